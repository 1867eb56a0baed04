"""Blocks of a corpus: together they are every line exactly once, by the same names as the whole file's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyarrow import fs

from synapse_host.bulk import Corpus, parts
from synapse_host.errors import InvalidRequest

FACTS = {"manifest_digest": "m"}


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 16, 1000])
@pytest.mark.parametrize("content", ["a\nbb\n\nccc\n", "one\r\ntwo", "\n\n\nx", "é\nü\n"])
def test_blocks_are_the_file_cut_at_lines(tmp_path: Path, content: str, block_bytes: int) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(content.encode())
    local = fs.LocalFileSystem()
    blocks = parts.find_blocks(str(source), block_bytes=block_bytes)
    found, before = [], 0
    for block in blocks:
        found += list(parts.block_texts(local, block, "text", before, None))
        before += parts.count_lines(local, block)
    assert found == list(Corpus.of(source))
    assert len({block.key(FACTS) for block in blocks}) == len(blocks)


def test_row_groups_of_a_table_are_its_blocks(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    source = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"text": list("abcde")}), source, row_group_size=2)
    local = fs.LocalFileSystem()
    blocks = parts.find_blocks(str(tmp_path))
    texts = [text for block in blocks for text in parts.block_texts(local, block, "text", 0, None)]
    assert len(blocks) == 3 and texts == list(Corpus.of(source))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a.jsonl", "b.csv", "sub/c.jsonl"]),
        ("*.jsonl", ["a.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "sub/c.jsonl"]),
        ("sub/*", ["sub/c.jsonl", "sub/d.bin"]),
        ("b.csv", ["b.csv"]),
    ],
)
@pytest.mark.parametrize("uri", [False, True], ids=["path", "uri"])
def test_a_source_is_a_file_a_folder_or_a_pattern(tmp_path: Path, pattern: str, names: list[str], uri: bool) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "b.csv", "sub/c.jsonl", "sub/d.bin"):
        (tmp_path / name).write_text('"x"\n')
    source = f"{tmp_path.as_uri() if uri else tmp_path}/{pattern}".rstrip("/")
    blocks = parts.find_blocks(source)
    assert [Path(block.file).relative_to(tmp_path).as_posix() for block in blocks] == names
    with pytest.raises(InvalidRequest, match="holds no text file"):
        parts.find_blocks(f"{tmp_path}/none*")


def test_what_a_run_wrote_into_the_folder_of_its_corpus_is_none_of_it(tmp_path: Path) -> None:
    for name in ("a.jsonl", "x.npy.errors.jsonl", "out/errors.jsonl", "out.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('"x"\n')
    found = parts.find_blocks(str(tmp_path), leave=str(tmp_path / "out"))
    assert [Path(block.file).name for block in found] == ["a.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ("s3://bucket/in/*.jsonl", "s3://bucket/in"),
        ("s3://bucket/in?region=x", "s3://bucket/in?region=x"),
        ("s3://bucket/in/**/*.txt?region=x", "s3://bucket/in?region=x"),
        ("in/?.txt", "in"),
        ("*.txt", "."),
    ],
)
def test_a_uri_s_query_says_where_the_storage_is(source: str, base: str) -> None:
    assert parts.base_of(source) == base


def test_a_file_that_changed_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a\n")
    [block] = parts.find_blocks(str(source))
    source.write_text("bb\n")
    [other] = parts.find_blocks(str(source))
    assert other.key(FACTS) != block.key(FACTS) != block.key({"manifest_digest": "n"})
    with pytest.raises(InvalidRequest, match="changed while it was read"):
        list(parts.block_texts(fs.LocalFileSystem(), block, "text", 0, None))


def test_a_part_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    local, path = fs.LocalFileSystem(), str(tmp_path / "part-1.parquet")
    file = parts.PartFile(local, path, 2)
    file.write(["a", "b"], np.ones((2, 2), np.float32), [1])
    assert parts.list_parts(local, str(tmp_path)) == [] and parts.part_facts(local, path) is None
    file.drop()
    assert list(tmp_path.iterdir()) == []
    file = parts.PartFile(local, path, 2)
    file.write(["a"], np.ones((1, 2), np.float32), [])
    file.end({"rows": 1})
    assert parts.list_parts(local, str(tmp_path)) == [path] and parts.part_facts(local, path) == {"rows": 1}
    (tmp_path / "part-2.parquet").write_bytes(b"no table")
    with pytest.raises(InvalidRequest, match="part-2"):
        parts.part_facts(local, str(tmp_path / "part-2.parquet"))
