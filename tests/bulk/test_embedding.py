"""A corpus embedded into a file: rows, ids, what is left out, what a stopped run leaves; and a file of queries."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synapse_host.bulk import Chunking, Corpus, Policy, embed_file, rerank_file
from synapse_host.bulk.search import Index
from synapse_host.cli.console import Console
from synapse_host.config import HostConfig
from synapse_host.errors import EngineCrashed, InvalidRequest, SequenceTooLong
from synapse_host.host import Host
from tests.support.scripted import expected_vector
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle, write_matrix

pytestmark = pytest.mark.process
QUIET = Console(quiet=True)


def run(root: Path, work: Callable[[Host], Awaitable[Any]], script: dict[str, Any] | None = None) -> Any:
    matrix = write_matrix(root, script)
    models = {name: root / name for name in ("toy", "judge")}
    for name, task in (("toy", "embed"), ("judge", "rerank")):
        if not models[name].exists():
            write_bundle(models[name], model_id=name, task=task)

    async def main() -> Any:
        async with Host.open(matrix, models, HostConfig(shutdown_grace=5)) as host:
            return await work(host)

    return asyncio.run(main())


def vector(text: str) -> list[float]:
    ids = [CLS, *(WORDS.index(word) for word in text.split()), SEP]
    return [float(np.float32(value)) for value in expected_vector(ids)]


def test_ids_follow_the_vectors(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "first", "text": "a"}\n"b"\n{"id": "two\\nlines", "text": "c"}\n')
    out = tmp_path / "x.npy"
    document = run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(source), out))
    assert document["n"] == 3 and document["skipped"] == 0
    assert np.load(out).tolist() == [vector("a"), vector("b"), vector("c")]
    ids = (tmp_path / "x.npy.ids.txt").read_text().splitlines()
    assert ids == ["first", f"{source}:2", '"two\\nlines"']
    assert [path.name for path in sorted(tmp_path.glob("x.npy*"))] == ["x.npy", "x.npy.ids.txt", "x.npy.meta.json"]


def test_a_table_has_ids_and_vectors(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet isn't installed")
    out = tmp_path / "x.parquet"
    policy = Policy(chunking=Chunking(2))
    run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(["a b c", "d"]), out, policy=policy))
    table = parquet.read_table(out).to_pydict()
    assert table == {
        "id": ["0#0", "0#1", "1#0"],
        "vector": [vector("a b"), vector("c"), vector("d")],
        "truncated": [False, False, False],
    }
    assert [path.name for path in tmp_path.glob("x.parquet*")] == ["x.parquet"]


@pytest.mark.parametrize("out", ["x.npy", "x.parquet", "x.jsonl"])
def test_a_link_under_a_passing_name_is_not_written_through(tmp_path: Path, out: str) -> None:
    if out == "x.parquet":
        pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    other, file, source = tmp_path / "other", tmp_path / out, tmp_path / "in.jsonl"
    other.write_text("somebody's")
    for name in ("", ".progress.json", ".meta.json", ".ids.txt", ".errors.jsonl"):
        file.with_name(f"{out}{name}.part").symlink_to(other)
    file.with_name(f"{out}.partial").symlink_to(other)
    if out == "x.jsonl":
        source.write_text('{"query": "query", "docs": ["a"]}')
        run(tmp_path, lambda host: rerank_file(host, "judge", str(source), file, display=QUIET))
    else:
        source.write_text('{"id": "a", "text": "a"}\n{\n')
        policy = Policy(on_error="skip")
        run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(source), file, policy=policy))
    assert other.read_text() == "somebody's"
    assert file.is_file() and not any(path.is_symlink() for path in tmp_path.glob(f"{out}*") if path.suffix != ".part")


LINES = '"a"\n{"id": "long", "text": "%s"}\n"b"\n{\n""\n"c"\n' % ("a " * 40)


@pytest.mark.parametrize("out", ["x.npy", "x.parquet"])
def test_bad_texts_are_left_out_and_listed(tmp_path: Path, out: str) -> None:
    source, file = tmp_path / "in.jsonl", tmp_path / out
    source.write_text(LINES)
    policy = Policy(on_error="skip")
    document = run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(source), file, policy=policy))
    assert (document["n"], document["skipped"]) == (3, 3)
    errors = [json.loads(line) for line in (tmp_path / f"{out}.errors.jsonl").read_text().splitlines()]
    assert {(error["where"], error["code"]) for error in errors} == {
        (f"{source}:4", "invalid_request"),
        (f"{source}:5", "invalid_request"),
        (f"{source}:2", "sequence_too_long"),
    }
    index = Index(file)
    assert index.rows == 3
    [hits] = index.nearest(np.array([vector("c")], np.float32), 1)
    assert (hits[0].row, round(hits[0].score, 5)) == (2, 1.0)
    assert index.texts([0, 2], run(tmp_path, _bundle)) == {0: "a", 2: "c"}


async def _bundle(host: Host) -> Any:
    return host.bundles["toy"]


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('"' + "a " * 40 + '"', SequenceTooLong, "in.jsonl:2: has 42 tokens, toy takes 16."),
        ("{", InvalidRequest, "in.jsonl:2: not valid JSON"),
        ('""', InvalidRequest, "in.jsonl:2: the text is empty."),
    ],
)
def test_a_bad_text_stops_a_run_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(f'"a"\n{line}\n')
    with pytest.raises(error) as caught:
        run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of("in.jsonl"), Path("x.npy")))
    assert str(caught.value).startswith(message)
    assert not list(tmp_path.glob("x.npy*")), "nothing plausible is left"


@pytest.mark.parametrize(
    ("empty", "rows"), [("zero", ["", "a", "", "b", ""]), ("skip", ["a", "b"]), ("error", ["a", "b"])]
)
def test_empty_texts_and_blank_lines_may_have_zeros(tmp_path: Path, empty: Any, rows: list[str]) -> None:
    """A blank line of a .txt is an empty text only where each line is to have a row."""
    source, out, text = tmp_path / "in.jsonl", tmp_path / "x.npy", tmp_path / "in.txt"
    source.write_text("\n".join(map(json.dumps, rows if empty == "error" else ["", "a", " ", "b", ""])))
    text.write_text("\na\n \nb\n\n")
    for file in (source, text):
        run(tmp_path, lambda host, file=file: embed_file(host, "toy", Corpus.of(file), out, policy=Policy(empty=empty)))
        assert np.load(out).tolist() == [vector(row) if row else [0.0] * 8 for row in rows]


@pytest.mark.parametrize("name", ["x.npy", "x.parquet"])
@pytest.mark.parametrize(("lines", "best"), [("", 0), ('"a"\n"query b"\n', 1), ('"query b"\n' * 40, 0)])
def test_a_corpus_of_any_size_with_short_vectors(tmp_path: Path, name: str, lines: str, best: int) -> None:
    """Cut and of length 1 again, as toy normalises; a search's queries are cut to what the index has.

    Of equal rows the first is found.
    """
    if name == "x.parquet":
        pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    source, out = tmp_path / "in.jsonl", tmp_path / name
    source.write_text(lines)

    async def work(host: Host) -> Any:
        short = await host.embed("toy", [json.loads(line) for line in lines.splitlines()], dimensions=3)
        document = await embed_file(host, "toy", Corpus.of(source), out, policy=Policy(dimensions=3))
        for wrong in (0, 9, True, 2.0):
            with pytest.raises(InvalidRequest, match="dimensions is"):
                await host.embed("toy", [], dimensions=wrong)  # type: ignore[arg-type]
        return short, document["n"], document["dims"], await host.embed("toy", ["query b"], dimensions=3)

    short, n, dims, query = run(tmp_path, work)
    assert (n, dims) == short.shape == (lines.count("\n"), 3)
    index = Index(out)
    assert (index.rows, index.dims) == short.shape
    [hits] = index.nearest(query, 1)
    assert [(hit.row, round(hit.score, 5)) for hit in hits] == ([(best, 1.0)] if n else [])
    if name == "x.npy":
        assert np.load(out).tolist() == short.tolist()


def test_a_kill_between_two_renames_leaves_no_mixed_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an older result of as many rows: what is found there is the one, or the other, or no index."""
    out = tmp_path / "x.npy"
    sources = [tmp_path / name for name in ("old.jsonl", "new.jsonl")]
    for source, rows in zip(sources, (["a", "b"], ["c", "d"]), strict=True):
        source.write_text("".join(json.dumps({"id": row, "text": row}) + "\n" for row in rows))
    calls, really = [0], os.replace

    class Killed(BaseException):
        pass

    async def work(host: Host) -> list[str]:
        found = []
        for steps in range(1, 99):
            calls[0] = 99
            await embed_file(host, "toy", Corpus.of(sources[0]), out)
            calls[0] = steps
            try:
                await embed_file(host, "toy", Corpus.of(sources[1]), out)
                return found
            except Killed:
                pass
            try:
                index = Index(out)
            except InvalidRequest:
                found.append("none")
                continue
            found.append("".join(index.nearest(np.array([vector(row)], np.float32), 1)[0][0].id for row in "abcd"))
        return found

    def replace(*paths: Any) -> None:
        calls[0] -= 1
        if not calls[0]:
            raise Killed
        really(*paths)

    monkeypatch.setattr(os, "replace", replace)
    found = run(tmp_path, work)
    monkeypatch.undo()
    whole = {run(tmp_path, lambda host, file=file: _names(host, file, out)) for file in sources}
    assert len(found) >= 4 and {"none"} < set(found) <= {*whole, "none"}


async def _names(host: Host, source: Path, out: Path) -> str:
    await embed_file(host, "toy", Corpus.of(source), out)
    return "".join(Index(out).nearest(np.array([vector(row)], np.float32), 1)[0][0].id for row in "abcd")


def test_a_stopped_run_goes_on_and_leaves_out_the_same(tmp_path: Path) -> None:
    """The third block meets the death of its worker; a bad text lies on either side of it."""
    source, out = tmp_path / "in.txt", tmp_path / "x.npy"
    words = [WORDS[4 + number % 6] for number in range(3000)]
    words[5] = words[2500] = "a " * 40
    source.write_text("\n".join(words))
    policy = Policy(on_error="skip")
    script = {"state": str(tmp_path / "spawns"), "generations": [
        {"rules": [{"on": "EMBED_BATCH", "nth": 11, "do": [{"signal": "SIGKILL"}]}]}, {},
    ]}  # fmt: skip

    async def twice(host: Host) -> Any:
        with pytest.raises(EngineCrashed):
            await embed_file(host, "toy", Corpus.of(source), out, policy=policy)
        return await embed_file(host, "toy", Corpus.of(source), out, policy=policy)

    document = run(tmp_path, twice, script)
    assert (document["resumed_at"], document["n"], document["skipped"]) == (2047, 2998, 2)
    expected = [vector(word) for word in words if len(word) == 1]
    assert np.load(out).tolist() == expected
    assert len((tmp_path / "x.npy.errors.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("prompt", "resumed"), [("query", True), ("none", False)])
def test_a_prompt_is_remembered_and_another_one_begins_anew(tmp_path: Path, prompt: str, resumed: bool) -> None:
    write_bundle(tmp_path / "toy", model_id="toy", prompts={"query": "query ", "doc": "b "}, default_prompt="doc")
    out = tmp_path / "x.npy"
    script = {"state": str(tmp_path / "spawns"), "generations": [
        {"rules": [{"on": "EMBED_BATCH", "nth": 9, "do": [{"signal": "SIGKILL"}]}]}, {},
    ]}  # fmt: skip
    corpus = Corpus.of(["a b"] * 2049)  # the third block meets the death of its worker

    async def twice(host: Host) -> Any:
        with pytest.raises(InvalidRequest, match="doc, query, none"):
            await embed_file(host, "toy", corpus, out, policy=Policy(prompt="passage"))
        with pytest.raises(EngineCrashed):
            await embed_file(host, "toy", corpus, out, policy=Policy(prompt="query"))
        return await embed_file(host, "toy", corpus, out, policy=Policy(prompt=prompt))

    assert (run(tmp_path, twice, script)["resumed_at"] > 0) == resumed
    assert np.load(out)[[0, 2048]].tolist() == [vector("query a b" if prompt == "query" else "a b")] * 2
    index = Index(out)
    assert index.facts["prompt"] == prompt
    cut = Policy(prompt=prompt, chunking=Chunking(1))
    run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(_file(tmp_path)), out, policy=cut))
    assert Index(out).texts([0, 1], run(tmp_path, _bundle)) == {0: "a", 1: "b"}


def _file(folder: Path) -> Path:
    (folder / "in.txt").write_text("a b\n")
    return folder / "in.txt"


# --- search ----------------------------------------------------------------------------------------------------------


META = {
    "model": "m", "manifest_digest": "", "dims": 2, "n": 3, "files": [], "column": "text", "input_digest": "",
    "truncate": False, "empty": "error", "on_error": "stop", "chunk": None, "left_out": [],
}  # fmt: skip


def test_the_nearest_rows_are_those_of_the_whole_product(tmp_path: Path) -> None:
    """More rows than one block; equal rows keep their order."""
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((70_000, 16), dtype=np.float32)
    vectors[69_999] = vectors[40_000] = vectors[3] * 2
    np.save(tmp_path / "x.npy", vectors)
    (tmp_path / "x.npy.meta.json").write_text(json.dumps({**META, "dims": 16, "n": 70_000}))
    queries = np.stack([vectors[3], rng.standard_normal(16, dtype=np.float32)])
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors, axis=1, keepdims=True)
    for query, hits in zip(queries, Index(tmp_path / "x.npy").nearest(queries, 5), strict=True):
        scores = unit @ (query / np.linalg.norm(query))
        best = sorted(range(len(scores)), key=lambda row: (-round(scores[row], 6), row))[:5]
        assert [hit.row for hit in hits] == best
        assert np.allclose([hit.score for hit in hits], scores[best], atol=1e-5)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"no")
    np.save(tmp_path / "alone.npy", np.zeros((2, 2), np.float32))
    np.save(tmp_path / "lies.npy", np.zeros((2, 2), np.float32))
    (tmp_path / "lies.npy.meta.json").write_text(json.dumps(META))
    for name in ("x.npy", "alone.npy", "lies.npy", "none.npy"):
        with pytest.raises(InvalidRequest, match="is no index"):
            Index(tmp_path / name)


@pytest.mark.parametrize(
    ("meta", "ids", "worst", "why"),
    [
        ({"n": 3.5}, b"", 1, "Expected `int`, got `float`"),
        ({"files": [1]}, b"", 1, "Expected `str`, got `int`"),
        ({"chunk": 5}, b"", 1, "Expected `array . null`, got `int`"),
        ({}, b"a\nb\n", 1, "fewer lines than there are rows"),
        ({}, b"a\n\xff\nc\n", 1, "can't decode"),
        ({}, b'a\n"b\nc\n', 1, "Unterminated"),
        ({}, b"a\nb\nc\n", np.nan, "it holds what is no number"),
    ],
)
def test_an_index_that_is_damaged_is_refused(
    tmp_path: Path, meta: dict[str, Any], ids: bytes, worst: float, why: str
) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4], [5, worst]], np.float32))
    (tmp_path / "x.npy.meta.json").write_text(json.dumps({**META, **meta}))
    (tmp_path / "x.npy.ids.txt").write_bytes(ids)
    with pytest.raises(InvalidRequest, match=f"is no index .*{why}"):
        Index(tmp_path / "x.npy").nearest(np.ones((1, 2), np.float32), 3)


@pytest.mark.parametrize("change", ["id", "vector", "null", "fewer"])
def test_a_table_that_was_changed_is_no_index(tmp_path: Path, change: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"id": ["a", "b", "c"], "vector": pyarrow.array([[1, 2]] * 3, pyarrow.list_(pyarrow.float32(), 2))}
    table = pyarrow.table(columns).replace_schema_metadata({"synapse": json.dumps(META)})
    good = tmp_path / "good.parquet"
    parquet.write_table(table, good)
    assert [hit.id for hit in Index(good).nearest(np.ones((1, 2), np.float32), 3)[0]] == ["a", "b", "c"]
    if change == "null":
        column = pyarrow.array([[1, 2], None, [5, 6]], columns["vector"].type)
        table = table.set_column(1, "vector", column).replace_schema_metadata(table.schema.metadata)
    else:
        table = table.slice(1) if change == "fewer" else table.drop_columns([change])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InvalidRequest, match="is no index"):
        Index(tmp_path / "x.parquet").nearest(np.ones((1, 2), np.float32), 3)


def test_an_index_of_another_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    run(tmp_path, lambda host: embed_file(host, "toy", Corpus.of(["a"]), out))
    bundle = run(tmp_path, _bundle)
    Index(out).check_model(bundle, "toy")
    meta = json.loads((tmp_path / "x.npy.meta.json").read_text())
    (tmp_path / "x.npy.meta.json").write_text(json.dumps({**meta, "manifest_digest": "0" * 64}))
    with pytest.raises(InvalidRequest, match="made by another model"):
        Index(out).check_model(bundle, "toy")


# --- queries ---------------------------------------------------------------------------------------------------------


def test_scores_of_a_file_of_queries_go_on_where_they_stopped(tmp_path: Path) -> None:
    source, out = tmp_path / "q.jsonl", tmp_path / "s.jsonl"
    lines = [{"id": n, "query": "query", "docs": ["a", "b"]} for n in range(4)]
    source.write_text("\n".join(map(json.dumps, lines)))
    script = {"state": str(tmp_path / "spawns"), "generations": [
        {"rules": [{"on": "RERANK", "nth": 3, "do": [{"signal": "SIGKILL"}]}]}, {},
    ]}  # fmt: skip

    async def twice(host: Host) -> Any:
        with pytest.raises(EngineCrashed, match=r"q\.jsonl:3: "):
            await rerank_file(host, "judge", str(source), out, display=QUIET)
        assert not out.exists()
        return await rerank_file(host, "judge", str(source), out, display=QUIET)

    document = run(tmp_path, twice, script)
    assert (document["n"], document["resumed_at"]) == (4, 2)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == ["0", "1", "2", "3"]
    assert all(sorted(row["order"]) == [0, 1] and row["scores"] == found[0]["scores"] for row in found)
    assert [path.name for path in tmp_path.glob("s.jsonl*")] == ["s.jsonl"]
