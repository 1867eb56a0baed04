"""A corpus embedded into a file: rows, ids, what is left out, what a stopped run leaves; and a file of queries."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synapse_host.bulk import Chunking, Corpus, Policy, embed_file, rerank_file
from synapse_host.bulk.embedding import Reader
from synapse_host.bulk.search import Hit, Index
from synapse_host.cli.console import Console
from synapse_host.config import HostConfig
from synapse_host.errors import EngineCrashed, InvalidRequest, SequenceTooLong
from synapse_host.host import Host
from tests.support.small_bundle import WORDS, vector, write_bundle, write_matrix

pytestmark = pytest.mark.process
QUIET = Console(quiet=True)


Hosting = Callable[..., AbstractAsyncContextManager[Host]]


@pytest.fixture
def hosting(tmp_path: Path) -> Hosting:
    """Open a host of scripted models: `toy` embeds (texts of at most 16 tokens), `judge` reranks."""

    @asynccontextmanager
    async def opened(script: dict[str, Any] | None = None, **toy: Any) -> AsyncIterator[Host]:
        models = {"toy": write_bundle(tmp_path / "toy", model_id="toy", **toy)}
        models["judge"] = write_bundle(tmp_path / "judge", model_id="judge", task="rerank")
        async with Host.open(write_matrix(tmp_path, script), models, HostConfig(shutdown_grace=5)) as host:
            yield host

    return opened


def dying(tmp_path: Path, on: str, nth: int) -> dict[str, Any]:
    """A worker that is killed by its *nth* request; the next one is well."""
    rule = {"on": on, "nth": nth, "do": [{"signal": "SIGKILL"}]}
    return {"state": str(tmp_path / "spawns"), "generations": [{"rules": [rule]}, {}]}


def best(index: Index, text: str) -> Hit:
    [[hit]] = index.nearest(np.array([vector(text)], np.float32), 1)
    return hit


async def test_ids_follow_the_vectors(tmp_path: Path, hosting: Hosting) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "x.npy"
    source.write_text('{"id": "first", "text": "a"}\n"b"\n{"id": "two\\nlines", "text": "c"}\n')
    async with hosting() as host:
        document = await embed_file(host, "toy", Corpus.of(source), out)
    assert document["n"] == 3 and document["skipped"] == 0
    assert np.load(out).tolist() == [vector("a"), vector("b"), vector("c")]
    ids = (tmp_path / "x.npy.ids.txt").read_text().splitlines()
    assert ids == ["first", f"{source}:2", '"two\\nlines"']
    assert [path.name for path in sorted(tmp_path.glob("x.npy*"))] == ["x.npy", "x.npy.ids.txt", "x.npy.meta.json"]


async def test_a_table_has_ids_and_vectors(tmp_path: Path, hosting: Hosting) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet isn't installed")
    out = tmp_path / "x.parquet"
    async with hosting() as host:
        await embed_file(host, "toy", Corpus.of(["a b", "a " * 40, "d"]), out, policy=Policy(truncate=True))
    assert parquet.read_table(out).to_pydict() == {
        "id": ["0", "1", "2"],
        "vector": [vector("a b"), vector("a " * 14), vector("d")],
        "truncated": [False, True, False],
    }
    assert [path.name for path in tmp_path.glob("x.parquet*")] == ["x.parquet"]


@pytest.mark.parametrize("out", ["x.npy", "x.parquet", "x.jsonl"])
async def test_a_link_under_a_passing_name_is_not_written_through(tmp_path: Path, hosting: Hosting, out: str) -> None:
    if out == "x.parquet":
        pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    other, file, source = tmp_path / "other", tmp_path / out, tmp_path / "in.jsonl"
    other.write_text("somebody's")
    for name in ("", ".progress.json", ".meta.json", ".ids.txt", ".errors.jsonl"):
        file.with_name(f"{out}{name}.part").symlink_to(other)
    file.with_name(f"{out}.partial").symlink_to(other)
    async with hosting() as host:
        if out == "x.jsonl":
            source.write_text('{"query": "query", "docs": ["a"]}')
            await rerank_file(host, "judge", str(source), file, display=QUIET)
        else:
            source.write_text('{"id": "a", "text": "a"}\n{\n')
            await embed_file(host, "toy", Corpus.of(source), file, policy=Policy(on_error="skip"))
    assert other.read_text() == "somebody's"
    assert file.is_file() and not any(path.is_symlink() for path in tmp_path.glob(f"{out}*") if path.suffix != ".part")


@pytest.mark.parametrize("out", ["x.npy", "x.parquet"])
async def test_bad_texts_are_left_out_and_listed(tmp_path: Path, hosting: Hosting, out: str) -> None:
    source, file = tmp_path / "in.jsonl", tmp_path / out
    source.write_text('"a"\n{"id": "long", "text": "%s"}\n"b"\n{\n""\n"c"\n' % ("a " * 40))
    async with hosting() as host:
        document = await embed_file(host, "toy", Corpus.of(source), file, policy=Policy(on_error="skip"))
        bundle = host.bundles["toy"]
    assert (document["n"], document["skipped"]) == (3, 3)
    errors = [json.loads(line) for line in (tmp_path / f"{out}.errors.jsonl").read_text().splitlines()]
    assert {(error["where"], error["code"]) for error in errors} == {
        (f"{source}:4", "invalid_request"),
        (f"{source}:5", "invalid_request"),
        (f"{source}:2", "sequence_too_long"),
    }
    index = Index(file)
    assert index.rows == 3 and (best(index, "c").row, round(best(index, "c").score, 5)) == (2, 1.0)
    assert index.texts([0, 2], bundle) == {0: "a", 2: "c"}


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('"' + "a " * 40 + '"', SequenceTooLong, "in.jsonl:2: has 42 tokens, toy takes 16."),
        ("{", InvalidRequest, "in.jsonl:2: not valid JSON"),
        ('""', InvalidRequest, "in.jsonl:2: the text is empty."),
    ],
)
async def test_a_bad_text_stops_a_run_by_its_place(
    tmp_path: Path,
    hosting: Hosting,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(f'"a"\n{line}\n')
    with pytest.raises(error) as caught:
        async with hosting() as host:
            await embed_file(host, "toy", Corpus.of("in.jsonl"), Path("x.npy"))
    assert str(caught.value).startswith(message)
    assert not list(tmp_path.glob("x.npy*")), "nothing plausible is left"


@pytest.mark.parametrize(
    ("empty", "rows"), [("zero", ["", "a", "", "b", ""]), ("skip", ["a", "b"]), ("error", ["a", "b"])]
)
async def test_empty_texts_and_blank_lines_may_have_zeros(
    tmp_path: Path, hosting: Hosting, empty: Any, rows: list[str]
) -> None:
    """A blank line of a .txt is an empty text only where each line is to have a row."""
    source, out, text = tmp_path / "in.jsonl", tmp_path / "x.npy", tmp_path / "in.txt"
    source.write_text("\n".join(map(json.dumps, rows if empty == "error" else ["", "a", " ", "b", ""])))
    text.write_text("\na\n \nb\n\n")
    async with hosting() as host:
        for file in (source, text):
            await embed_file(host, "toy", Corpus.of(file), out, policy=Policy(empty=empty))
            assert np.load(out).tolist() == [vector(row) if row else [0.0] * 8 for row in rows]


@pytest.mark.parametrize("name", ["x.npy", "x.parquet"])
@pytest.mark.parametrize(("lines", "found"), [("", 0), ('"a"\n"query b"\n', 1), ('"query b"\n' * 40, 0)])
async def test_a_corpus_of_any_size_with_short_vectors(
    tmp_path: Path, hosting: Hosting, name: str, lines: str, found: int
) -> None:
    """Cut and of length 1 again, as toy normalises; a search's queries are cut to what the index has.

    Of equal rows the first is found.
    """
    if name == "x.parquet":
        pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    source, out = tmp_path / "in.jsonl", tmp_path / name
    source.write_text(lines)
    async with hosting() as host:
        short = await host.embed("toy", [json.loads(line) for line in lines.splitlines()], dimensions=3)
        query = await host.embed("toy", ["query b"], dimensions=3)
        document = await embed_file(host, "toy", Corpus.of(source), out, policy=Policy(dimensions=3))
        for wrong in (0, 9, True, 2.0):
            with pytest.raises(InvalidRequest, match="dimensions is"):
                await host.embed("toy", [], dimensions=wrong)  # type: ignore[arg-type]
    assert (document["n"], document["dims"]) == short.shape == (lines.count("\n"), 3)
    index = Index(out)
    assert (index.rows, index.dims) == short.shape
    [hits] = index.nearest(query, 1)
    assert [(hit.row, round(hit.score, 5)) for hit in hits] == ([(found, 1.0)] if lines else [])
    if name == "x.npy":
        assert np.load(out).tolist() == short.tolist()


async def test_a_kill_between_two_renames_leaves_no_mixed_result(
    tmp_path: Path, hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an older result of as many rows: what is found there is the one, or the other, or no index."""
    out, really, found, left = tmp_path / "x.npy", os.replace, [], 0
    sources = [tmp_path / name for name in ("old.jsonl", "new.jsonl")]
    for source, rows in zip(sources, (["a", "b"], ["c", "d"]), strict=True):
        source.write_text("".join(json.dumps({"id": row, "text": row}) + "\n" for row in rows))

    class Killed(BaseException):
        pass

    def replace(*paths: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        really(*paths)

    monkeypatch.setattr(os, "replace", replace)
    async with hosting() as host:
        for steps in range(1, 99):
            left = 0
            await embed_file(host, "toy", Corpus.of(sources[0]), out)
            left = steps
            try:
                await embed_file(host, "toy", Corpus.of(sources[1]), out)
                break
            except Killed:
                pass
            try:
                hits = {row: best(Index(out), row) for row in "abcd"}
                found.append("".join(row for row, hit in hits.items() if hit.id == row and hit.score > 0.999))
            except InvalidRequest:
                found.append("none")
    assert len(found) >= 4 and {"none"} < set(found) <= {"ab", "cd", "none"}


async def test_a_caller_who_leaves_keeps_the_place_until_the_result_is_written(
    tmp_path: Path, hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it can't be stopped: another run would meet its files."""
    out, really, writing, go = tmp_path / "x.npy", os.replace, threading.Event(), threading.Event()

    def replace(source: Any, target: Any) -> None:
        if Path(target) == out:
            writing.set()
            assert go.wait(30)
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    async with hosting() as host:
        run = asyncio.create_task(embed_file(host, "toy", Corpus.of(["a"]), out))
        assert await asyncio.to_thread(writing.wait, 30)
        run.cancel()
        _, waiting = await asyncio.wait({run}, timeout=0.2)
        assert waiting
        with pytest.raises(InvalidRequest, match="another"):
            await embed_file(host, "toy", Corpus.of(["b"]), out)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert np.load(out).tolist() == [vector("a")]


async def test_a_corpus_of_bad_texts_is_refused_every_time(
    tmp_path: Path, hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "x.npy"
    source.write_text(f"{'a ' * 40}\nb\n{'a ' * 40}\n")
    monkeypatch.setattr("synapse_host.bulk.corpus.MAX_SKIPPED", 1)
    async with hosting() as host:
        for _ in "again", "and again":
            with pytest.raises(InvalidRequest, match="more than 1 texts can't be embedded"):
                await embed_file(host, "toy", Corpus.of(source), out, policy=Policy(on_error="skip"))


async def test_a_stopped_run_goes_on_and_leaves_out_the_same(tmp_path: Path, hosting: Hosting) -> None:
    """The third block meets the death of its worker; a bad text lies on either side of it."""
    source, out = tmp_path / "in.txt", tmp_path / "x.npy"
    words = [WORDS[4 + number % 6] for number in range(3000)]
    words[5] = words[2500] = "a " * 40
    source.write_text("\n".join(words))
    policy = Policy(on_error="skip")
    async with hosting(dying(tmp_path, "EMBED_BATCH", 11)) as host:
        with pytest.raises(EngineCrashed):
            await embed_file(host, "toy", Corpus.of(source), out, policy=policy)
        document = await embed_file(host, "toy", Corpus.of(source), out, policy=policy)
    assert (document["resumed_at"], document["n"], document["skipped"]) == (2047, 2998, 2)
    assert np.load(out).tolist() == [vector(word) for word in words if len(word) == 1]
    assert len((tmp_path / "x.npy.errors.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("change", ["grew", "shrank"])
async def test_a_corpus_that_changes_while_it_is_read_is_no_result(
    tmp_path: Path, hosting: Hosting, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source, surveyed = tmp_path / "in.txt", Reader.survey
    source.write_text("a\nb\n")

    def survey(reader: Reader) -> Any:
        told = surveyed(reader)
        source.write_text("a\nb\nc\n" if change == "grew" else "a\n")
        return told

    monkeypatch.setattr(Reader, "survey", survey)
    async with hosting() as host:
        with pytest.raises(InvalidRequest, match=f"in.txt {change} while it was read"):
            await embed_file(host, "toy", Corpus.of(source), tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()


@pytest.mark.parametrize(("prompt", "resumed"), [("query", True), ("none", False)])
async def test_a_prompt_is_remembered_and_another_one_begins_anew(
    tmp_path: Path, hosting: Hosting, prompt: str, resumed: bool
) -> None:
    out, corpus, short = tmp_path / "x.npy", Corpus.of(["a b"] * 2049), tmp_path / "in.txt"
    short.write_text("a b\n")
    prompts: dict[str, Any] = {"prompts": {"query": "query ", "doc": "b "}, "default_prompt": "doc"}
    async with hosting(dying(tmp_path, "EMBED_BATCH", 9), **prompts) as host:  # the third block
        with pytest.raises(InvalidRequest, match="doc, query, none"):
            await embed_file(host, "toy", corpus, out, policy=Policy(prompt="passage"))
        with pytest.raises(EngineCrashed):
            await embed_file(host, "toy", corpus, out, policy=Policy(prompt="query"))
        again = await embed_file(host, "toy", corpus, out, policy=Policy(prompt=prompt))
        assert (again["resumed_at"] > 0) == resumed
        assert np.load(out)[[0, 2048]].tolist() == [vector("query a b" if prompt == "query" else "a b")] * 2
        assert Index(out).facts["prompt"] == prompt
        await embed_file(host, "toy", Corpus.of(short), out, policy=Policy(prompt=prompt, chunking=Chunking(1)))
        assert Index(out).texts([0, 1], host.bundles["toy"]) == {0: "a", 1: "b"}


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


@pytest.mark.parametrize(
    ("meta", "ids", "rows", "why"),
    [
        (None, b"", [[1, 2]] * 3, "No such file"),
        ({}, b"", [[1, 2]] * 2, "aren't the 3 x 2"),
        ({"n": 3.5}, b"", [[1, 2]] * 3, "Expected `int`, got `float`"),
        ({"chunk": 5}, b"", [[1, 2]] * 3, "Expected `array . null`, got `int`"),
        ({}, b"a\nb\n", [[1, 2]] * 3, "fewer lines than there are rows"),
        ({}, b"a\n\xff\nc\n", [[1, 2]] * 3, "can't decode"),
        ({}, b'a\n"b\nc\n', [[1, 2]] * 3, "Unterminated"),
        ({}, b"", [[1, 2], [1, 2], [1, np.nan]], "it holds what is no number"),
        ({}, b"", None, "magic string"),
    ],
)
def test_an_index_that_is_damaged_or_none_is_refused(
    tmp_path: Path, meta: dict[str, Any] | None, ids: bytes, rows: list[list[float]] | None, why: str
) -> None:
    if rows is None:
        (tmp_path / "x.npy").write_bytes(b"nothing of the kind")
    else:
        np.save(tmp_path / "x.npy", np.array(rows, np.float32))
    if meta is not None:
        (tmp_path / "x.npy.meta.json").write_text(json.dumps({**META, **meta}))
    if ids:
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


async def test_an_index_of_another_model_is_refused(tmp_path: Path, hosting: Hosting) -> None:
    out, meta = tmp_path / "x.npy", tmp_path / "x.npy.meta.json"
    async with hosting() as host:
        await embed_file(host, "toy", Corpus.of(["a"]), out)
        bundle = host.bundles["toy"]
    Index(out).check_model(bundle, "toy")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "manifest_digest": "0" * 64}))
    with pytest.raises(InvalidRequest, match="made by another model"):
        Index(out).check_model(bundle, "toy")


# --- queries ---------------------------------------------------------------------------------------------------------


async def test_scores_of_a_file_of_queries_go_on_where_they_stopped(tmp_path: Path, hosting: Hosting) -> None:
    source, out = tmp_path / "q.jsonl", tmp_path / "s.jsonl"
    lines = [{"id": n, "query": "query", "docs": ["a", "b"]} for n in range(4)]
    source.write_text("\n".join(map(json.dumps, lines)))
    async with hosting(dying(tmp_path, "RERANK", 3)) as host:
        with pytest.raises(EngineCrashed, match=r"q\.jsonl:3: "):
            await rerank_file(host, "judge", str(source), out, display=QUIET)
        assert not out.exists()
        document = await rerank_file(host, "judge", str(source), out, display=QUIET)
    assert (document["n"], document["resumed_at"]) == (4, 2)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == ["0", "1", "2", "3"]
    assert all(sorted(row["order"]) == [0, 1] and row["scores"] == found[0]["scores"] for row in found)
    assert [path.name for path in tmp_path.glob("s.jsonl*")] == ["s.jsonl"]


def test_a_link_in_a_circle_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "x.npy").symlink_to("x.npy")
    with pytest.raises(InvalidRequest, match="is no index"):
        Index(tmp_path / "x.npy")
