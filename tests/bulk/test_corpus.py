"""What a corpus reads: kinds of files, ids, and where a bad text is."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from engines.bundle import manifest
from synapse_host.bulk import Chunking, Corpus, Policy
from synapse_host.errors import InvalidRequest
from synapse_host.text.tokenizer import TextTokenizer
from tests.support.small_bundle import write_bundle


@pytest.mark.parametrize(
    ("name", "content", "texts", "ids"),
    [
        ("a.jsonl", '"x"\n\n{"id": 7, "text": "y"}\n', ["x", "y"], ["a.jsonl:1", "7"]),
        ("a.txt", '\ufeffone\r\n\n"two"\n', ["one", "", '"two"'], ["a.txt:1", "a.txt:2", "a.txt:3"]),
        ("a.md", "# head\n\nbody\n", ["# head\n\nbody\n"], ["a.md"]),
        ("a.csv", 'id,text\n1,"two\nlines"\n2,b\n', ["two\nlines", "b"], ["1", "2"]),
        ("a.log", '{"text": "x"}\n"y"\n', ["x", "y"], ["a.log:1", "a.log:2"]),
        ("b.log", '"quoted" and more\n{"text": "x"}\n', ['"quoted" and more', '{"text": "x"}'], ["b.log:1", "b.log:2"]),
    ],
)
def test_kinds_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, texts: list[str], ids: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content.encode())
    corpus = Corpus.of(name)
    assert [text.text for text in corpus] == texts
    assert [text.id for text in corpus] == ids, "it can be read again"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are Unicode")
def test_a_name_that_is_no_unicode_makes_an_id_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.md")).write_text("a")
    (found,) = Corpus.of(tmp_path)
    assert (found.text, found.id) == ("a", f"{tmp_path}/\\udcff.md")


def test_a_parquet_table_and_its_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet isn't installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    body = pyarrow.array([b"a", b"b", None, b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"id": [10, None, 12, 13], "body": body}), file)
    bad: list[str] = []
    found = Corpus.of(file, column="body").read(lambda error: bad.append(error.message))
    assert [(text.id, text.text) for text in found] == [("10", "a"), (f"{file}:2", "b")]
    assert bad == [f"{file}:3: column body holds NoneType, not text", f"{file}:4: not UTF-8 text"]
    with pytest.raises(InvalidRequest, match="there is no column 'text'"):
        list(Corpus.of(file))
    good = file.read_bytes()
    for broken in (b"PAR1 not a table PAR1", good[:10] + b"\xff" * 30 + good[40:]):
        file.write_bytes(broken)
        with pytest.raises(InvalidRequest, match=r"t\.parquet: can't be read as parquet"):
            list(Corpus.of(file, column="body"))


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written = {"b.txt": "two", "a.jsonl": '"one"', "sub/c.md": "three", "picture.png": "no", "x.npy.ids.txt": "no"}
    for name, content in written.items():
        (tmp_path / name).write_text(content)
    assert [text.text for text in Corpus.of(tmp_path)] == ["one", "two", "three"]
    (tmp_path / "sub" / "c.md").unlink()
    with pytest.raises(InvalidRequest, match="file is in this folder"):
        Corpus.of(tmp_path / "sub")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", b'"a"\n{"text": 1}\n', "a.jsonl:2: must be"),
        ("a.jsonl", b'"a"\n{\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'"a"\n' + b"[" * 100_000, "a.jsonl:2: must be"),
        ("a.jsonl", b'"a\\ud800"\n', "a.jsonl:1: not valid JSON: half a surrogate pair"),
        ("a.jsonl", b'{"id": "\\ud800", "text": "a"}\n', "a.jsonl:1: not valid JSON"),
        ("a.jsonl", b'{"id": true, "text": "a"}\n', "a.jsonl:1: must be"),
        ("a.txt", b"a\n\xff\n", "a.txt:2: not UTF-8"),
        ("a.csv", b"text\na\nb,c\n", "a.csv:3: has 2 fields, the head has 1"),
        ("a.csv", b'text\n"a\n', "a.csv:2: not valid CSV"),
        ("a.csv", b"body\na\n", "a.csv: there is no column 'text'"),
        ("a.json", b'[\n"a",\n"b"\n]\n', "a.json:1: a JSON array isn't read"),
        ("none.txt", None, "none.txt: can't be read"),
    ],
)
def test_a_bad_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(InvalidRequest) as caught:
        list(Corpus.of(name))
    assert caught.value.message.startswith(where)


def test_what_can_t_be_read_twice_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"one"\n{\n"two"\n')))
    corpus, bad = Corpus.of("-", skip=True), list[InvalidRequest]()
    for _ in range(2):
        assert [text.where for text in corpus.read(bad.append)] == ["stdin:1", "stdin:3"]
    assert [error.details["line"] for error in bad] == [2, 2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"one"\n{\n"two"\n')))
    with pytest.raises(InvalidRequest, match="stdin:2: not valid JSON"):
        Corpus.of("-")
    assert sys.stdin.read() == '"two"\n', "it is refused where it is met"


def test_the_digest_tells_another_content_and_not_another_name(tmp_path: Path) -> None:
    for name, content in (("a.txt", "x\n"), ("b.txt", "x\n"), ("c.txt", "y\n")):
        (tmp_path / name).write_text(content)
    same, moved, other = (Corpus.of(tmp_path / name).digest() for name in ("a.txt", "b.txt", "c.txt"))
    assert same == moved != other
    assert Corpus.of(["x"]).digest() != Corpus.of(["y"]).digest()


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ("3", ["a b c", "d e f", "a b"]),
        ("3:1", ["a b c", "c d e", "e f a", "a b"]),
        ("14", ["a  b c d e f a b"]),
    ],
)
def test_chunks_are_cut_where_a_token_ends(tmp_path: Path, chunk: str, expected: list[str]) -> None:
    tokenizer = TextTokenizer(manifest.read(write_bundle(tmp_path)))
    corpus = Corpus.of(["a b c d e f a b" if len(expected) > 1 else expected[0]])
    found = list(Policy(chunking=Chunking.of(chunk)).entries(corpus, tokenizer))
    assert [text.text for text in found] == expected
    assert [text.id for text in found] == [f"0#{number}" for number in range(len(expected))]


def test_chunks_of_a_long_text_cover_it(tmp_path: Path) -> None:
    """Longer than what the tokenizer gets at once, with gaps that have no token at all."""
    tokenizer = TextTokenizer(manifest.read(write_bundle(tmp_path)))
    words = ["abcdef"[number % 6] for number in range(50_000)]
    text = " ".join(words[:30_000]) + " " * 300_000 + " ".join(words[30_000:])
    pieces = list(tokenizer.pieces(text, 10))
    assert [word for piece in pieces for word in piece.split()] == words
    assert {len(piece.split()) for piece in pieces} == {10}
    assert list(tokenizer.pieces("   ", 4)) == ["   "], "what has no tokens is left to be refused"


def test_chunks_leave_room_for_the_prompt(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(manifest.read(write_bundle(tmp_path, prompts={"query": "query query "})))
    Chunking(12).check(tokenizer, "query")
    with pytest.raises(InvalidRequest, match="takes 12 beside"):
        Chunking(13).check(tokenizer, "query")
    # Two letters are one unknown word: cut between them, each is a word, and the prompt's two tokens count.
    for prompt in ("query", None):
        for piece in tokenizer.pieces("a,b;" * 20, tokenizer.room(prompt), 0, prompt):
            assert tokenizer.rows([piece], prompt=prompt).truncated == []


@pytest.mark.parametrize("chunk", ["0", "x", "3:3", "3:x", "-1", "15", "3:", "9" * 5000])
def test_chunks_that_make_no_sense(tmp_path: Path, chunk: str) -> None:
    tokenizer = TextTokenizer(manifest.read(write_bundle(tmp_path)))  # takes 14 beside [CLS] and [SEP]
    with pytest.raises(InvalidRequest):
        Chunking.of(chunk).check(tokenizer)
