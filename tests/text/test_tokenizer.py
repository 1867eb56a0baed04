from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engines.bundle.manifest import Bundle, FileRef, read
from synapse_host.errors import BundleInvalid, InvalidRequest, SequenceTooLong
from synapse_host.text.rows import Rows, compose_ids, special_frame
from synapse_host.text.tokenizer import TextTokenizer
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle

A, B, C, QUERY = (WORDS.index(word) for word in ("a", "b", "c", "query"))
UNK = WORDS.index("[UNK]")


def bundle(tmp_path: Path, **options: Any) -> Bundle:
    return read(write_bundle(tmp_path / "b", **options))


def rows_of(ids: Any, lengths: list[int]) -> list[list[int]]:
    flat, rows = ids.tolist(), []
    for length in lengths:
        rows.append(flat[:length])
        flat = flat[length:]
    assert not flat
    return rows


def changed(found: Bundle, **parts: Any) -> Bundle:
    """Return a bundle whose tokenizer.json has other *parts*."""
    file = found.path("tokenizer.json")
    return written(found, json.dumps({**json.loads(file.read_text()), **parts}))


def written(found: Bundle, text: str) -> Bundle:
    found.path("tokenizer.json").write_text(text)
    tokenizer = FileRef("tokenizer.json", "sha256:" + hashlib.sha256(text.encode()).hexdigest())
    return replace(found, manifest=replace(found.manifest, tokenizer=tokenizer))


def test_special_tokens_stand_around_each_row_and_baked_in_padding_is_off(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path))
    rows = tokenizer.rows(["a b", "c"])
    assert rows.ids.dtype == np.int32
    assert rows_of(rows.ids, rows.lengths) == [[CLS, A, B, SEP], [CLS, C, SEP]]
    # The file truncates to 12; a longer text keeps all its tokens.
    assert tokenizer.rows(["a " * 13]).lengths == [15]


PIECES = ["<unk>", "<s>", "</s>", "\u2581", "\u2581a", "a", "b", "s", "<", ">", "/", "é"]
VOCABULARY = {piece: id for id, piece in enumerate(PIECES)}
SPACES = {"type": "WhitespaceSplit"}
MARK = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
KINDS: dict[str, Any] = {
    # SentencePiece gives its control symbols the best score; the library takes them.
    "Unigram": (META, {"vocab": [[piece, 0.0 if id < 3 else -5.0] for id, piece in enumerate(PIECES)], "unk_id": 0}),
    "BPE": (META, {"vocab": VOCABULARY, "merges": [["\u2581", "a"]], "unk_token": "<unk>"}),
    "BPE whole words": (SPACES, {"vocab": VOCABULARY, "merges": [], "unk_token": "<unk>", "ignore_merges": True}),
    "BPE that merges them": (
        SPACES,
        {"vocab": VOCABULARY | {"<s": 12}, "merges": [["<", "s"], ["<s", ">"]], "unk_token": "<unk>"},
    ),
    "WordPiece": (SPACES, {"vocab": VOCABULARY, "unk_token": "<unk>", "continuing_subword_prefix": ""}),
    "WordLevel": (SPACES, {"vocab": VOCABULARY, "unk_token": "<unk>"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_tokens_literal_is_text(tmp_path: Path, kind: str) -> None:
    split, model = KINDS[kind]
    marks = [{"id": id, "content": PIECES[id], **MARK} for id in range(3)]
    parts = {"model": {"type": kind.split()[0], **model}, "added_tokens": marks, "pre_tokenizer": split}
    found = TextTokenizer(changed(bundle(tmp_path), **parts, post_processor=None))
    for text, pieces in {
        "a <s> b": ["a", "<", "s", ">", "b"],
        "</s>": ["<", "/", "s", ">"],
        "é </s> b": ["é", "<", "/", "s", ">", "b"],
        "a ø b": ["a", "<unk>", "b"],
        "<s> ø": ["<", "s", ">", "<unk>"],
    }.items():
        wanted = [VOCABULARY[piece] for piece in pieces]
        if kind == "WordLevel":  # it has no pieces of a word: one that is unknown
            wanted = [VOCABULARY[word] if word in "abé" else 0 for word in text.split()]
        for ids in (found.rows([text, "a"]).ids.tolist()[:-1], found.literal(text)):
            plain = [each for id in ids for each in ({4: [5], 12: [8, 7]}.get(id, [id])) if id != 3]
            assert plain == wanted and not {1, 2} & set(ids), text
        assert found.mentions_special(text) == ("s>" in text)
    assert kind.startswith("Word") or VOCABULARY["<"] in found.literal("<unk>")
    # Pieces are counted as they are encoded; a word that is cut may have two more.
    assert max(len(found.literal(piece)) for piece in found.pieces("a <s> b " * 20, 12)) <= 14


def test_too_long_is_refused_by_index_and_cut_only_on_request(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, max_tokens=6), model="named")
    with pytest.raises(SequenceTooLong) as caught:
        tokenizer.rows(["a", "a b c d e"], offset=100)
    assert caught.value.details == {"index": 101, "tokens": 7, "max_tokens": 6}
    assert "named takes 6" in caught.value.message
    rows = tokenizer.rows(["a", "a b c d e", "b"], truncate=True, offset=100)
    assert rows.truncated == [101]
    assert rows_of(rows.ids, rows.lengths)[1] == [CLS, A, B, C, WORDS.index("d"), SEP]


PROMPTS: Any = {"prompts": {"query": "query ", "long": "a b ", "bare": ""}, "default_prompt": "query"}


@pytest.mark.parametrize(
    ("prompt", "before"), [(None, [QUERY]), ("query", [QUERY]), ("long", [A, B]), ("bare", []), ("none", [])]
)
def test_a_prompt_is_before_every_text_and_never_cut(tmp_path: Path, prompt: str | None, before: list[int]) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, max_tokens=6, **PROMPTS))
    room = 4 - len(before)
    assert tokenizer.room(prompt) == room
    assert tokenizer.rows(["c", "b"], prompt=prompt).ids.tolist() == [CLS, *before, C, SEP, CLS, *before, B, SEP]
    rows = tokenizer.rows(["c " * room, "c " * 9], truncate=True, prompt=prompt)
    assert rows_of(rows.ids, rows.lengths) == [[CLS, *before, *[C] * room, SEP]] * 2
    assert rows.truncated == [1]
    with pytest.raises(SequenceTooLong) as caught:
        tokenizer.rows(["c " * 5], prompt=prompt)
    assert caught.value.details["tokens"] == 7 + len(before)
    with pytest.raises(InvalidRequest, match="text 3 is empty"):
        tokenizer.rows([" "], offset=3, prompt=prompt)
    if len(before) == 2:
        with pytest.raises(InvalidRequest, match="leaves no room"):
            TextTokenizer(bundle(tmp_path, max_tokens=4, **PROMPTS)).rows(["c"], truncate=True, prompt=prompt)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "text 1 is empty"),
        (" \n\t", "text 1 is empty"),
        ("\ud800", "half a surrogate pair"),
        (7, "is int, not text"),
    ],
)
def test_what_is_no_text_is_refused_by_index(tmp_path: Path, text: Any, words: str) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path))
    with pytest.raises(InvalidRequest, match=words) as caught:
        tokenizer.rows(["a", text])
    assert caught.value.details == {"index": 1}


def test_segments_are_bare_and_pairs_composed(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, task="rerank"))
    query, documents = tokenizer.segments("query", ["a b", "c"])
    assert query.tolist() == [QUERY]
    assert rows_of(documents.ids, documents.lengths) == [[A, B], [C]]
    pairs = tokenizer.pairs("query", ["a b", "c"])
    assert rows_of(pairs.ids, pairs.lengths) == [[CLS, QUERY, SEP, A, B, SEP], [CLS, QUERY, SEP, C, SEP]]
    for compose in (tokenizer.segments, tokenizer.pairs):
        with pytest.raises(InvalidRequest, match="document 1 is empty"):
            compose("query", ["a", " "])


def test_truncation_cuts_the_document_only(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, task="rerank", max_tokens=7))
    for compose in (tokenizer.pairs, tokenizer.segments):
        with pytest.raises(SequenceTooLong) as caught:
            compose("query query", ["a", "a b c"])
        assert caught.value.details == {"index": 1, "tokens": 8, "max_tokens": 7}
    pairs = tokenizer.pairs("query query", ["a", "a b c"], truncate=True)
    assert rows_of(pairs.ids, pairs.lengths)[1] == [CLS, QUERY, QUERY, SEP, A, B, SEP]
    assert pairs.truncated == [1]
    _, documents = tokenizer.segments("query query", ["a b c"], truncate=True)
    assert documents.lengths == [2]
    with pytest.raises(InvalidRequest, match="leaves no room for a document"):
        tokenizer.pairs("query " * 4, ["a"], truncate=True)


def test_the_family_supplies_what_a_tokenizer_without_post_processor_lacks(tmp_path: Path) -> None:
    special = {"cls": CLS, "sep": SEP, "eos": 13}
    bert = TextTokenizer(bundle(tmp_path / "1", frame=False, special_ids=special))
    assert bert.rows(["a"]).ids.tolist() == [CLS, A, SEP]
    qwen = TextTokenizer(bundle(tmp_path / "2", frame=False, special_ids=special, family="qwen3"))
    assert qwen.rows(["a"]).ids.tolist() == [A, 13]
    llama = TextTokenizer(bundle(tmp_path / "3", frame=False, special_ids=special, task="generate"))
    assert llama.prompt("a b").ids.tolist() == [A, B]
    pair = TextTokenizer(bundle(tmp_path / "4", frame=False, special_ids=special, task="rerank"))
    assert pair.pairs("query", ["a"]).ids.tolist() == [CLS, QUERY, SEP, A, SEP]


def test_a_qwen3_reranker_gets_its_question_around_the_pair(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, task="rerank", family="qwen3", frame=False, max_tokens=200))
    start, end = WORDS.index("<|im_start|>"), WORDS.index("<|im_end|>")
    rows = tokenizer.pairs("query <|im_end|>", ["a", "b c"])
    first = rows_of(rows.ids, rows.lengths)[0]
    # The template's own marks are special tokens, the one in the query is text.
    assert first.count(start) == 3 and first.count(end) == 2 and UNK in first
    assert rows.lengths[1] == rows.lengths[0] + 1
    short = TextTokenizer(
        bundle(tmp_path / "s", task="rerank", family="qwen3", frame=False, max_tokens=rows.lengths[0])
    )
    with pytest.raises(SequenceTooLong):
        short.pairs("query <|im_end|>", ["b c"])
    assert short.pairs("query <|im_end|>", ["b c"], truncate=True).truncated == [0]
    with pytest.raises(InvalidRequest, match="leaves no room"):
        short.pairs("query <|im_end|> query", ["a"], truncate=True)
    assert start not in tokenizer.literal("<|im_start|>")
    with pytest.raises(InvalidRequest, match="leaves no room"):
        tokenizer.pairs("query " * 200, ["a"], truncate=True)


def test_a_qwen3_reranker_reads_each_document_once(tmp_path: Path) -> None:
    found = bundle(tmp_path, task="rerank", family="qwen3", frame=False, max_tokens=200)
    tokenizer = TextTokenizer(found)
    counting = Counting(tokenizer)
    tokenizer.pairs("query", ["a " * 20, "b " * 20])
    documents = [size for sizes in counting.sizes for size in sizes if size > 150]
    assert len(documents) == 2
    with pytest.raises(InvalidRequest, match="document 1 is empty"):
        tokenizer.pairs("query", ["a", " "])
    drops = {"type": "Replace", "pattern": {"String": "ø"}, "content": ""}
    with pytest.raises(InvalidRequest, match="document 1 has no tokens") as caught:
        TextTokenizer(changed(found, normalizer=drops)).pairs("query", ["a", "øø"])
    assert caught.value.details == {"index": 1}


def test_a_broken_or_a_changed_tokenizer_is_a_broken_bundle(tmp_path: Path) -> None:
    found = bundle(tmp_path)
    file = found.path("tokenizer.json")
    file.write_bytes(file.read_bytes() + b" ")
    # Before it gives other ids.
    with pytest.raises(BundleInvalid, match="was changed: its digest is sha256:") as caught:
        TextTokenizer(found)
    assert caught.value.details["expected"] == found.manifest.tokenizer.digest
    for text in ("", "{}", "not json"):
        with pytest.raises(BundleInvalid, match="can't be read as a tokenizer"):
            TextTokenizer(written(found, text))
    file.unlink()
    with pytest.raises(BundleInvalid, match="can't be read as a tokenizer: No such file"):
        TextTokenizer(found)


def test_both_readings_of_a_tokenizer_are_of_one_file(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(found := bundle(tmp_path))
    found.path("tokenizer.json").write_text("{}")
    assert tokenizer.template("<|im_start|>") != tokenizer.literal("<|im_start|>")


def test_pairs_from_ids_without_a_tokenizer(tmp_path: Path) -> None:
    query = np.array([7], np.int32)
    found = bundle(tmp_path, task="rerank", tokenizer=False, special_ids={"cls": 101, "sep": 102})
    rows = compose_ids(special_frame(found), query, Rows(np.array([8, 9, 9], np.int32), [1, 2], []))
    assert rows_of(rows.ids, rows.lengths) == [[101, 7, 102, 8, 102], [101, 7, 102, 9, 9, 102]]
    few = compose_ids(special_frame(found), np.array([7, 6], np.int32), Rows(np.array([8] * 9, np.int32), [1] * 9, []))
    assert rows_of(few.ids, few.lengths) == [[101, 7, 6, 102, 8, 102]] * 9
    bare = bundle(tmp_path / "x", task="rerank", tokenizer=False)
    with pytest.raises(InvalidRequest, match="pairs can't be composed"):
        special_frame(bare)


class Counting:
    """A tokenizer that notes how many characters it gets at once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.real = tokenizer._plain
        self.sizes: list[list[int]] = []
        tokenizer._plain = self  # type: ignore[assignment]

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.sizes.append([len(text) for text in texts])
        return self.real.encode_batch(texts, **options)

    def encode(self, text: str, **options: Any) -> Any:
        self.sizes.append([len(text)])
        return self.real.encode(text, **options)


def test_many_texts_reach_the_tokenizer_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.text.tokenizer.BATCH_CHARACTERS", 10)
    monkeypatch.setattr("synapse_host.text.tokenizer.BATCH_TEXTS", 4)
    tokenizer = TextTokenizer(bundle(tmp_path, max_tokens=12))
    counting = Counting(tokenizer)
    texts = ["a b c", "a", "b", "a b c d e", "c", "b c d e f", *"abcdef"]
    rows = tokenizer.rows(texts)
    assert counting.sizes == [[5, 1, 1], [9, 1], [9, 1], [1, 1, 1, 1], [1]]
    monkeypatch.undo()
    assert rows_of(rows.ids, rows.lengths) == [
        rows_of(r.ids, r.lengths)[0] for r in (tokenizer.rows([text]) for text in texts)
    ]


@pytest.mark.parametrize("sizes", [(64, 64), (1 << 18, 1 << 16)], ids=["small pieces", "the real ones"])
def test_a_long_text_is_read_until_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr("synapse_host.text.tokenizer.BATCH_CHARACTERS", sizes[0])
    tokenizer = TextTokenizer(bundle(tmp_path, max_tokens=40))
    counting = Counting(tokenizer)
    whole = "a b c d e f " * 5000
    rows = tokenizer.rows(["a", whole, "b"], truncate=True)
    assert rows.truncated == [1] and rows.lengths == [3, 40, 3]
    # The same as the first tokens of the whole, of which a small part was read.
    assert rows.ids.tolist()[3:43] == [CLS, *counting.real.encode(whole, add_special_tokens=False).ids[:38], SEP]
    assert sum(map(sum, counting.sizes)) <= 2 * 16384 + 2
    with pytest.raises(SequenceTooLong, match=r"text 0 has at least \d+ tokens") as caught:
        tokenizer.rows([whole])
    assert 40 < caught.value.details["tokens"] < 30_000
    # Long, but of few tokens: read whole, in growing pieces.
    thin = "a" + " " * 50_000 + "b"
    assert tokenizer.rows([thin]).lengths == [4]


def test_a_text_that_can_t_fit_is_refused_unread(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path))
    counting = Counting(tokenizer)
    text = "a " * (tokenizer.max_characters // 2 + 1)
    with pytest.raises(SequenceTooLong) as caught:
        tokenizer.rows(["a", text])
    assert caught.value.details["index"] == 1 and not counting.sizes
    # Cut, it is one of many tokens; of spaces and nothing behind them in what is read, it has none.
    assert tokenizer.rows([text], truncate=True).lengths == [16]
    assert tokenizer.rows(["a" + " " * tokenizer.max_characters + "b"], truncate=True).truncated == [0]


def test_a_prompt_or_a_query_is_never_cut_in_silence(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundle(tmp_path, task="rerank"))
    thin = "a" + " " * tokenizer.max_characters + "b"  # of two tokens, of which one is read
    for encode in (tokenizer.template, tokenizer.literal):
        with pytest.raises(SequenceTooLong, match=r"^the prompt has at least 17 tokens"):
            encode(thin)
        assert len(encode("a " * 20_000)) > 16
    with pytest.raises(InvalidRequest, match="the query has at least 1 tokens and leaves no room"):
        tokenizer.pairs(thin, ["a"])


def test_tokenisation_of_all_threads_stays_in_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.text.limits.BUDGET_CHARACTERS", 50_000)
    tokenizer = TextTokenizer(bundle(tmp_path, max_tokens=40_000))
    real, lock = tokenizer._plain, threading.Lock()
    now = most = 0

    class Slow:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            nonlocal now, most
            with lock:
                now += sum(map(len, texts))
                most = max(most, now)
            time.sleep(0.01)
            try:
                return real.encode_batch(texts, **options)
            finally:
                with lock:
                    now -= sum(map(len, texts))

    tokenizer._plain = Slow()  # type: ignore[assignment]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda n: tokenizer.rows(["a " * 10_000] * n), [1, 2, 1, 5, 1, 2, 1, 1]))
    assert [len(each.lengths) for each in rows] == [1, 2, 1, 5, 1, 2, 1, 1]
    assert 40_000 <= most <= 100_000  # five texts of one call are more than the budget and go alone


def test_a_panic_of_the_library_is_a_broken_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust panics are BaseExceptions: left alone they end the host."""

    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_batch(self, *_: Any, **__: Any) -> Any:
            raise PanicException("index out of bounds")

    tokenizer = TextTokenizer(bundle(tmp_path))
    tokenizer._plain = Panicking()  # type: ignore[assignment]
    with pytest.raises(BundleInvalid, match=r"bundle toy: tokenizer\.json fails as a tokenizer: index out of bounds"):
        tokenizer.rows(["a"])
    found = bundle(tmp_path / "open")
    with monkeypatch.context() as patch:
        patch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_buffer=Panicking().encode_batch))
        with pytest.raises(BundleInvalid, match="can't be read as a tokenizer: index out of bounds"):
            TextTokenizer(found)


def test_special_ids_that_no_vocabulary_has_or_that_leave_no_room(tmp_path: Path) -> None:
    for words, options in (
        ("id 1073741824, beyond a vocabulary of 1048576", {"special_ids": {"cls": 2**30, "sep": SEP}, "frame": False}),
        ("id 3, beyond a vocabulary of 3", {"config": {"vocab_size": SEP}}),
    ):
        with pytest.raises(BundleInvalid, match=words):
            TextTokenizer(bundle(tmp_path, **options))
    with pytest.raises(BundleInvalid, match="its 2 special tokens leave no room in 2 tokens"):
        TextTokenizer(bundle(tmp_path / "full", max_tokens=2))
