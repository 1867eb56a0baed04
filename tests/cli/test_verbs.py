from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synapse_host.cli import VERBS
from synapse_host.cli.parser import Parser, UsageError, common_options
from tests.cli.conftest import Command, Here
from tests.support.scripted import expected_vector
from tests.support.small_bundle import CLS, SEP, WORDS, write_matrix

pytestmark = pytest.mark.process

A = WORDS.index("a")
B = WORDS.index("b")


def vector(ids: list[int]) -> list[float]:
    return [float(np.float32(value)) for value in expected_vector(ids)]


def test_embed(cli: Command, here: Here) -> None:
    done = cli("embed", "--model", "toy", "--json", "a b", "a")
    assert (done.code, done.err) == (0, "")
    document = done.document
    assert document["vectors"] == [vector([CLS, A, B, SEP]), vector([CLS, A, SEP])]
    assert {key: document[key] for key in ("model", "lane", "engine", "device", "dims", "n", "truncated")} == {
        "model": "toy", "lane": "embed", "engine": "scripted", "device": "cpu", "dims": 8, "n": 2, "truncated": [],
    }  # fmt: skip
    plain = here("embed", "--model", "toy", "a b")
    assert plain.code == 0 and len(plain.out.split()) == 8
    assert "1 x 8 from toy on scripted" in plain.err
    assert here("embed", "--model", "toy", "--quiet", "a b").err == ""


def test_a_prompt_is_chosen_by_its_name_and_search_takes_the_query(cli: Command, here: Here) -> None:
    cli.bundle("asks", prompts={"query": "query ", "doc": "b "}, default_prompt="doc")

    def vectors(*words: str) -> list[list[float]]:
        done = here("embed", "--json", "--model", "asks", *words)
        assert done.code == 0, done.err
        found: list[list[float]] = done.document["vectors"]
        return found

    assert vectors("a") == vectors("--prompt", "doc", "a") == vectors("--prompt", "none", "b a")
    assert vectors("--prompt", "query", "a") == vectors("--prompt", "none", "query a")
    refused = here("embed", "--json", "--model", "asks", "--prompt", "passage", "a")
    assert refused.code == 2 and refused.document["error"]["details"]["prompts"] == ["doc", "query", "none"]
    options = ("--model", "asks", "--prompt", "none", "--out", "x.npy")
    assert here("embed", *options, "c", "query a", "b a").code == 0
    for more, best in (((), 1), (("--prompt", "doc"), 2), (("--prompt", "none"), None)):
        (hit, *_) = here("search", "--json", "x.npy", "a", *more).document["results"][0]["hits"]
        assert (hit["row"] if hit["score"] > 0.99999 else None) == best
    refused = here("search", "x.npy", "a " * 30)
    assert refused.code == 2 and refused.err == "synapse: the query has 33 tokens, asks takes 16. Shorten it.\n"
    (shown,) = here("models", "show", "asks", "--json").document["models"]
    assert (shown["prompts"], shown["default_prompt"]) == ({"query": "query ", "doc": "b "}, "doc")


def test_embed_by_path_from_stdin_and_cut(cli: Command, here: Here) -> None:
    toy = str(cli.root / "models" / "toy")
    done = cli("embed", "--model", toy, "--file", "-", "--json", stdin='"a"\n{"id": 1, "text": "b"}\n\n')
    assert done.document["vectors"] == [vector([CLS, A, SEP]), vector([CLS, B, SEP])]
    assert here("embed", "--model", "toy", "--truncate", "--json", "a", "a " * 30).document["truncated"] == [1]
    said = here("embed", "--model", "toy", "--truncate", "a " * 30).err
    assert "1 text was cut to what toy takes, counted from 0: 0\n" in said


def test_embed_to_a_file_resumes_where_it_stopped(cli: Command, here: Here) -> None:
    lines = cli.root / "in.jsonl"
    words = [WORDS[4 + number % 6] for number in range(3000)]
    lines.write_text("".join(json.dumps(word) + "\n" for word in words))
    out = cli.root / "out.npy"
    # Two blocks of 1,024 are under way at a time; the worker dies at the third, so the first run fails.
    cli.setup({"state": str(cli.root / "spawns"), "generations": [
        {"rules": [{"on": "EMBED_BATCH", "nth": 10, "do": [{"signal": "SIGKILL"}]}]}, {},
    ]})  # fmt: skip
    arguments = ("embed", "--model", "toy", "--file", str(lines), "--out", str(out), "--json")
    first = cli(*arguments)
    assert first.code == 1 and first.document["error"]["code"] == "engine_crashed"
    progress = json.loads((cli.root / "out.npy.progress.json").read_text())
    assert progress["rows_done"] == 2048 and len(progress["input_digest"]) == 64
    second = here(*arguments)
    assert second.code == 0 and second.document["resumed_at"] == 2048
    assert not (cli.root / "out.npy.progress.json").exists()
    array = np.load(out)
    assert array.dtype == np.float32 and array.shape == (3000, 8)
    expected = {word: vector([CLS, WORDS.index(word), SEP]) for word in set(words)}
    assert array.tolist() == [expected[word] for word in words]


def test_rerank(cli: Command, here: Here) -> None:
    cli.bundle("judge", task="rerank")
    done = cli("rerank", "--model", "judge", "--json", "query", "a", "b")
    assert done.code == 0
    assert sorted(done.document["order"]) == [0, 1] and len(done.document["scores"]) == 2
    assert all(0 < score < 1 for score in done.document["scores"])
    raw = here("rerank", "--model", "judge", "--raw", "--json", "query", "a", "b").document["scores"]
    assert done.document["scores"] == pytest.approx([1 / (1 + np.exp(-value)) for value in raw], abs=1e-6)
    lines = '{"query": "query", "docs": ["a", "b"]}\n{"query": "a", "docs": ["b"]}\n'
    many = cli("rerank", "--model", "judge", "--file", "-", "--json", stdin=lines)
    assert many.document["results"][0]["scores"] == done.document["scores"]
    page = here("rerank", "--model", "judge", "query", "a", "b")
    assert page.code == 0 and page.out.splitlines()[0].startswith("  1  0.")
    (cli.root / "q.jsonl").write_text(lines + '{"query": "a", "docs": ["b", ""]}\n')
    refused = here("rerank", "--model", "judge", "--file", "q.jsonl")
    assert (refused.code, refused.err) == (2, "synapse: q.jsonl:3: document 1 is empty\n")
    (cli.root / "z.txt").write_text("a\n\nb\n")
    assert here("embed", "--model", "toy", "--file", "z.txt", "--empty", "zero", "--out", "z.npy").code == 0
    found = here("search", "z.npy", "a", "--rerank", "--reranker", "judge", "--json").document["results"][0]["hits"]
    assert sorted(hit["row"] for hit in found) == [0, 2], "an empty text can't be reranked"


def test_generate(cli: Command, here: Here) -> None:
    cli.bundle(
        "writer", task="generate", frame=False, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    done = cli("generate", "--model", "writer", "--json", "--max-tokens", "3", "a b")
    assert done.document["n_prompt"] == 2 and done.document["n_gen"] == 3
    assert set(done.document) == {"model", "lane", "engine", "device", "text", "n_prompt", "n_gen", "finish_reason"}
    piped = cli("generate", "--model", "writer", "--json", "--max-tokens", "3", "-", stdin="a b\n")
    assert piped.document == done.document
    odd = here("generate", "--model", "writer", "-")
    assert odd.code == 2 and "prompt is empty" in odd.err
    chat = here("generate", "--model", "writer", "--chat", "--json", "--max-tokens", "3", "a b")
    assert chat.document["text"] == done.document["text"]


DASHES: list[tuple[str, list[str], dict[str, Any]]] = [
    # verb, words, what they mean
    ("embed", ["--", "-x", "--json", "--"], {"texts": ["-x", "--json", "--"], "json": False}),
    ("embed", ["a", "--quiet", "--", "-b"], {"texts": ["a", "-b"], "quiet": True}),
    ("embed", ["--ray", "--", "a"], {"texts": ["a"], "ray": "local"}),
    ("rerank", ["--raw", "--", "-q", "-d", "e"], {"query": "-q", "documents": ["-d", "e"], "raw": True}),
    ("rerank", ["q", "--", "-d"], {"query": "q", "documents": ["-d"]}),
    ("search", ["--", "-i.npy", "-q"], {"index": Path("-i.npy"), "queries": ["-q"]}),
    ("search", ["i.npy", "q", "--top", "3", "--", "-r"], {"index": Path("i.npy"), "queries": ["q", "-r"], "top": 3}),
    ("generate", ["--max-tokens", "3", "--", "--chat"], {"prompt": "--chat", "max_tokens": 3, "chat": False}),
    *((verb, ["--", "-l"], {"lane": "-l"}) for verb in ("ping", "logs", "probe", "certify")),
    *((verb, ["--", "-m"], {"model": "-m"}) for verb in ("load", "unload")),
    ("build", ["--", "-cp", "-out"], {"checkpoint": "-cp", "out": Path("-out")}),
    ("models", ["--", "show", "-m"], {"action": "show", "name": ["-m"]}),
    ("matrix", ["--", "explain", "-l"], {"action": "explain", "lane": "-l"}),
    *((verb, ["--json", "--"], {"json": True}) for verb in ("serve", "ps", "doctor", "certificates", "bench", "demo")),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "words", "meant"), DASHES)
def test_behind_two_dashes_every_word_is_a_text(verb: str, words: list[str], meant: dict[str, Any]) -> None:
    parser = Parser(f"synapse {verb}", "")
    import_module(f"synapse_host.cli.{VERBS[verb].module or verb}").configure(parser)
    common_options(parser)
    read = vars(parser.read(words))
    assert {name: read[name] for name in meant} == meant
    with pytest.raises(UsageError) as caught:
        parser.read(["--nonsense", "--", "-x"])
    assert caught.value.message.isprintable()


def test_every_verb_takes_two_dashes(here: Here) -> None:
    assert {verb for verb, _, _ in DASHES} == set(VERBS)
    assert here("embed", "--model", "toy", "--json", "--", "-a", "--json").document["n"] == 2


def test_an_engine_is_chosen_by_its_name(cli: Command, here: Here) -> None:
    cli.bundle("judge", task="rerank").bundle("writer", task="generate", frame=False)
    with cli.bent_matrix() as matrix:
        for name in ("second", "third"):
            matrix["engines"][name] = matrix["engines"]["scripted"]
        for lane in matrix["lanes"].values():
            lane["engines"].append("second")
        matrix["lanes"]["aside"] = {"task": "embed", "engines": ["third"]}
    index = str(cli.root / "x.npy")
    for words in (
        ("embed", "--model", "toy", "a"),
        ("embed", "--model", "toy", "--out", index, "a"),
        ("rerank", "--model", "judge", "query", "a"),
        ("generate", "--model", "writer", "--max-tokens", "1", "a"),
    ):
        document = here(*words, "--engine", "second", "--json").document
        assert (document["lane"], document["engine"]) == (words[0], "second")
    found = here("search", index, "a", "--engine", "second", "--json").document["results"][0]["hits"]
    assert [hit["row"] for hit in found] == [0]
    # Without --lane it is the first lane of the task that lists the engine.
    document = here("embed", "--model", "toy", "--engine", "third", "--json", "a").document
    assert (document["lane"], document["engine"]) == ("aside", "third")
    for words, listed in (
        (("--engine", "fourth"), "scripted, second"),
        (("--engine", "second", "--lane", "aside"), "third"),
    ):
        done = here("embed", "--model", "toy", *words, "a")
        assert done.code == 2 and f"(fit here: {listed})" in done.err


def test_matrix_check_and_explain(cli: Command, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ok, 1 hardware classes, 1 engines, 3 lanes" in here("matrix", "check").out
    for lane in here("matrix", "check", "--json").document["lanes"]:
        assert lane["placement"] is None and lane["considered"][0]["engine"] == "scripted"
    (lane, *_) = cli("matrix", "explain", "--json", "--model", "toy").document["lanes"]
    assert lane["placement"] == "scripted" and lane["considered"][0]["verdict"] == "yes"
    page = here("matrix", "explain", "embed", "--model", "toy").out
    assert "lane embed (task embed, catalog)" in page and "YES" in page
    # The environment's matrix is taken, and an option wins.
    (cli.root / "own").mkdir()
    own = write_matrix(cli.root / "own", lanes={"mine": {"task": "embed", "engines": ["scripted"]}})
    monkeypatch.setenv("SYNAPSE_MATRIX", str(own))
    assert "scripted" in here("matrix", "explain", bare=True).out and "3 lanes" in here("matrix", "check").out
    assert [lane["lane"] for lane in here("matrix", "explain", "--json", bare=True).document["lanes"]] == ["mine"]
    assert json.loads(here("matrix", "schema").out)["title"] == "hw_matrix.yaml"


def test_doctor(cli: Command, here: Here) -> None:
    done = cli("doctor", "--json")
    assert set(done.document) == {"findings", "engines", "host"}
    assert done.document["engines"][0]["id"] == "scripted"
    for finding in done.document["findings"]:
        assert set(finding) == {"id", "severity", "what", "fix"}
    page = here("doctor")
    assert page.code == done.code and "scripted" in page.out


def test_the_page_of_verbs_the_version_and_a_verb_s_help(here: Here) -> None:
    page = here("--help", bare=True).out
    assert all(f"  {verb} " in page for verb in VERBS) and here("help", bare=True).out == page
    assert here("--version", bare=True).out.startswith("synapse ")
    assert here("help", "embed", bare=True).out == here("embed", "--help", bare=True).out != ""
    assert "no verb 'embd' (did you mean 'embed'?)" in here("help", "embd", bare=True).err
