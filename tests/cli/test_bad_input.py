"""Bad input: one clear line, the documented exit code, no traceback, no orphan (the fixture checks those)."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import synapse_host.cli.models
from tests.cli.conftest import Command, Here
from tests.support import toy_models

pytestmark = pytest.mark.process

ONE_LINE: list[tuple[tuple[str, ...], str]] = [
    # words, what the line says; each ends with status 2
    (("embd",), "no verb 'embd' (did you mean 'embed'?)"),
    (("embed",), "nothing to embed"),
    (("embed", "a", "--file", "bad.jsonl"), "not both"),
    (("embed", "a", "--chunk", "3"), "need --out"),
    (("embed", "a", "--ray"), "--ray needs --file"),
    (("embed", "--model", "toyy", "a"), "no model 'toyy' (have: "),
    (("embed", "--model", "toy", ""), "text 0: the text is empty"),
    (("embed", "--model", "toy", "a", "  "), "text 1: the text is empty"),
    (("embed", "--model", "toy", "a " * 30), "text 0 has 32 tokens, toy takes 16. Shorten it or pass --truncate"),
    (("embed", "--model", "toy", "--file", "none.jsonl"), "none.jsonl: can't be read: No such file"),
    (("embed", "--model", "toy", "--file", "bad.jsonl"), "bad.jsonl:2: not valid JSON"),
    (("embed", "--model", "toy", "--file", "odd.jsonl"), "odd.jsonl:1: must be a JSON string"),
    (("embed", "--model", "toy", "--file", "empty.jsonl"), "empty.jsonl holds no text"),
    (("embed", "--model", "toy", "--dimensions", "9", "a"), "dimensions is 9: toy gives 8 numbers"),
    (("embed", "--model", "toy", "--file", "bin.jsonl"), "bin.jsonl:1: not"),
    (("embed", "--model", "toy", "--out", "nowhere/x.npy", "a"), "nowhere/x.npy: can't be written"),
    (("embed", "--model", "toy", "--lane", "quiet", "a"), "no lane 'quiet' for toy (have: embed)"),
    (("embed", "--model", "judge", "a"), "judge is a model to rerank, not to embed"),
    (("embed", "--model", "toy", "--deadline", "soon", "a"), "'soon' is not a positive number of seconds"),
    (("embed", "--model", "toy", "--deadline", "-1", "a"), "not a positive number"),
    (("embed", "--model", "toy", "--jsn", "a"), "unrecognized arguments: --jsn"),
    (("embed", "--model", "./nothing", "a"), "nothing"),
    (("embed", "--model", "../../etc", "a"), "etc"),
    (("embed", "--model", "broken", "a"), "model broken: manifest.json is not valid JSON"),
    (("embed", "--model", "alien", "a"), "model alien: manifest.json"),
    (("embed", "--model", "ids-only", "a"), "has no tokenizer"),
    (("embed", "--model", "toy", "--models-dir", "bad.jsonl", "a"), "bad.jsonl: Not a directory"),
    (("models", "verify", "alien"), "model alien: manifest.json"),
    (("models", "path", "broken"), "model broken: manifest.json is not valid JSON"),
    (("models", "install", "./models/toy"), "./models/toy is a bundle's folder: nothing to install"),
    (("certify", "embed", "--model", "judge"), "no lane 'embed' for judge (it is a model to rerank)"),
    (("certify", "embedd", "--model", "judge"), "no lane 'embedd'"),
    (("certify",), "name a lane"),
    (("certify", "embed", "--all"), "not both"),
    (("certify", "embed", "--recheck", "e.json"), "not both"),
    (("certify", "--all", "--model", "toy"), "takes every model"),
    (("certify", "nowhere"), "no lane 'nowhere'"),
    (("certify", "embed", "--model", "nowhere"), "no model 'nowhere'"),
    (("certify", "embed", "--model", "toy", "--engine", "cuda"), "no engine 'cuda'"),
    (("certify", "embed", "--model", "toy", "--min-placement-share", "2"), "0 to 1"),
    (("certify", "--recheck", "nowhere.json"), "nowhere.json"),
    (("build", "nowhere", "out"), "nowhere is not a folder"),
    (("build", "cp", "out", "--formats", "onnx"), "'onnx' is not one of"),
    (("build", "cp", "out", "--dtype", "int4"), "not possible here"),
    (("build", "cp", "out", "--dtype", "coreml=f16"), "--dtype"),
    (("build", "cp", "out", "--max-tokens", "65"), "64 positions"),
    (("build", "cp", "out", "--max-tokens", "1e1"), "positive whole number"),
    (("build", "cp", "out", "--score", "sigmoid"), "for rerankers"),
    (("build", "cp", "out", "--task", "rerank"), "pooler.dense.weight"),
    (("build", "cp", "cp"), "not empty and not a bundle"),
    (("build", "cp", "cp/config.json"), "is a file"),
    (("build", "cp"), "OUT"),
    (("build", "cp", "models/toy"), "pass --force"),
    (("build", "cp", "out", "--name", "no good"), "model_id"),
    (("models", "path", "nope"), "no model 'nope'"),
    (("models", "verify", "nope"), "no model 'nope'"),
    (("models", "install", "nope"), "no model 'nope'"),
    (("models", "path", "minilm"), "synapse models install minilm"),
    (("models", "path"), "needs a name"),
    (("models", "install"), "needs a name"),
    (("models", "remove"), "needs a name"),
    (("models", "drop"), "invalid choice"),
    *((("bench", "--threads", wrong), f"{wrong!r} is not a positive whole number") for wrong in ("1e2", "1_0", "+5")),
    (("models", "list", "--deadline", "1e9"), "'1e9' is not a positive number of seconds"),
    (("search", "x.npy", "a", "--top", "0"), "'0' is not a positive whole number"),
    (("rerank", "query", "a", "--file", "odd.jsonl"), "not both"),
    (("rerank", "query", "a", "--out", "x.jsonl"), "needs a file of queries"),
    (("rerank", "--model", "judge", "--file", "empty.jsonl"), "holds no query"),
    (("rerank", "--model", "judge", "query"), "at least one document"),
    (("rerank", "--model", "judge", "", "a"), "query is empty"),
    (("rerank", "--model", "judge", "query", "a", ""), "document 1 is empty"),
    (("rerank", "--model", "judge", "query", "a " * 30), "document 0 has"),
    (("rerank", "--model", "judge", "query " * 30, "a"), "leaves no room for a document"),
    (("rerank", "--model", "judge", "--file", "odd.jsonl"), 'odd.jsonl:1: must be {"query"'),
    (("generate", "--model", "writer", ""), "prompt is empty"),
    (("generate", "--model", "writer", "a " * 30), "the prompt has 30 tokens, writer takes 16. Shorten it"),
    (("generate", "--model", "writer", "a", "--max-tokens", "0"), "'0' is not a positive whole number"),
    (("generate", "--model", "writer", "a", "--max-tokens", "99"), "writer takes 16"),
    (("generate", "--model", "writer", "--chat", "a"), "no chat template"),
    (("matrix", "chek"), "invalid choice: 'chek'"),
    (("matrix", "explain", "embedd"), "no lane 'embedd' in matrix.yaml (did you mean 'embed'?)"),
    (("serve", "--port", "99999"), "'99999' is not a port (0 to 65535)"),
]


@pytest.fixture
def full(cli: Command) -> Command:
    models = cli.root / "models"
    cli.bundle("judge", task="rerank").bundle("writer", task="generate", frame=False)
    cli.bundle("ids-only", tokenizer=False)
    for name, text in (("broken", '{"manifest_version": 1, "model_id": "x"'), ("alien", '{"hidden_size": 384}')):
        (models / name).mkdir()
        (models / name / "manifest.json").write_text(text)
    (cli.root / "bad.jsonl").write_text('"a"\n{"text": \n')
    (cli.root / "odd.jsonl").write_text("[1, 2]\n")
    (cli.root / "empty.jsonl").write_text("\n")
    (cli.root / "bin.jsonl").write_bytes(b"\xff\xfe\x00\n")
    toy_models.write_bert(cli.root / "cp")
    return cli


@pytest.mark.parametrize("verb", dict.fromkeys(words[0] for words, _ in ONE_LINE))
def test_one_clear_line_and_the_same_as_a_document(full: Command, here: Here, verb: str) -> None:
    before = sorted(full.root.rglob("*"))
    for words, line in ONE_LINE:
        if words[0] != verb:
            continue
        done = here(*words)
        assert (done.code, done.out) == (2, ""), words
        assert done.err.startswith("synapse: ") and done.err.count("\n") == 1, done.err
        assert line in done.err
        again = here(*words, "--json")
        error = again.document["error"]
        assert (again.err, again.code) == ("", 2)
        assert error["class"] == "permanent" and error["safe_to_retry_same_request"] is False
        assert error["message"] == done.err.removeprefix("synapse: ").rstrip("\n")
        assert isinstance(error["details"], dict)
    assert sorted(full.root.rglob("*")) == before, "nothing is made"


def test_a_typo_in_the_matrix_and_one_that_is_not_there(full: Command, here: Here) -> None:
    assert full.matrix is not None
    full.matrix.write_text(full.matrix.read_text().replace('"lanes"', '\n"lains"'))
    rest = [("rerank", "q", "d"), ("matrix", "check"), *((verb,) for verb in ("doctor", "demo", "bench"))]
    for words in (("embed", "--model", "toy", "a"), *rest):
        done = here(*words)
        assert done.code == 2
        assert "matrix.yaml:2:1: lains: unknown key (did you mean 'lanes'?)" in done.err and done.err.count("\n") == 1
    full.matrix = full.root / "none.yaml"
    done = here("embed", "--model", "toy", "a")
    assert done.code == 2 and "none.yaml: can't be read: No such file or directory" in done.err


class Panic(BaseException):
    """What a Rust library raises; pyo3's own is no Exception either."""


POOL = "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11"
CAUSED = AttributeError("argparse's own, while it puts things back")
CAUSED.__context__ = KeyboardInterrupt()
ENDS: list[tuple[BaseException, int, str, str]] = [
    # (how a verb ends, exit code, the document's code, what the line says)
    (ZeroDivisionError("x"), 1, "internal_error", "internal error: ZeroDivisionError: x"),
    (Panic("two\nlines"), 1, "internal_error", "internal error: Panic: two lines"),
    (Panic(POOL), 2, "invalid_request", "starts no further thread or process for this user: raise"),
    (RuntimeError("can't start new thread"), 2, "invalid_request", "ulimit -u"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 2, "invalid_request", "ulimit"),
    (OSError(errno.ENOSPC, "No space left on device", "f"), 1, "storage_full", "f: No space left"),
    (PermissionError(errno.EACCES, "Permission denied", "f"), 2, "invalid_request", "f: Permission"),
    (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
    (CAUSED, 130, "interrupted", "interrupted"),
]


@pytest.mark.parametrize(("end", "code", "name", "line"), ENDS, ids=[line[:30] for *_, line in ENDS])
def test_whatever_ends_a_verb_is_one_line_and_a_document(
    here: Here, monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int, name: str, line: str
) -> None:
    def run(*_: object) -> None:
        raise end

    monkeypatch.setattr(synapse_host.cli.models, "run", run)
    done = here("models")
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert done.err.startswith("synapse: ") and line in done.err
    document = here("models", "--json")
    assert (document.code, document.document["error"]["code"]) == (code, name)


REBUILD = ["llama-cpp-python was built for another CPU, rebuild it", "pip install"]
DEATHS: list[tuple[str, dict[str, Any], int, list[str]]] = [
    # when the worker does what; the exit code, and what the lines say
    ("EMBED_BATCH", {"abort": True}, 1, ["SIGABRT", "         | GGML_ASSERT(x) failed\n"]),
    ("EMBED_BATCH", {"signal": "SIGILL"}, 1, REBUILD),
    ("EMBED_BATCH", {"err": {"code": "backend_missing", "msg": "no device"}}, 4, ["no device"]),
    ("start", {"exit": 7}, 1, ["status 7"]),
    ("hello", {"hello": {"v": 2}}, 3, ["version is 2, expected 3"]),
]


@pytest.mark.parametrize(("when", "does", "code", "words"), DEATHS)
def test_a_dead_or_wrong_worker(
    cli: Command, here: Here, when: str, does: dict[str, Any], code: int, words: list[str]
) -> None:
    said = [{"stderr": "GGML_ASSERT(x) failed"}, does]
    cli.setup({"rules": [{"on": when, "do": said}]} if when.isupper() else {when: [does]})
    done = here("embed", "--model", "toy", "a")
    assert (done.code, done.out, done.err[:9]) == (code, "", "synapse: "), done.err
    assert all(word in done.err for word in words), done.err
    assert here("embed", "--model", "toy", "--empty", "zero", "").code == 0, "it needs no worker"
    error = here("embed", "--model", "toy", "a", "--json").document["error"]
    assert error["message"] and error["class"] in ("transient", "permanent")
    cli.check_clean()


def test_no_program_and_no_engine(cli: Command, here: Here) -> None:
    with cli.bent_matrix() as matrix:
        matrix["engines"]["scripted"]["worker"]["command"] = ["no-such-worker"]
    done = here("embed", "--model", "toy", "a")
    assert done.code == 4 and "no-such-worker" in done.err and done.err.startswith("synapse: ")
    with cli.bent_matrix() as matrix:
        matrix["hardware"]["any"] = {"cpu_features": ["warp_drive"]}
    done = here("embed", "--model", "toy", "a")
    assert done.code == here("matrix", "explain", "embed", "--model", "toy").code == 4
    assert "scripted: hardware any: cpu lacks warp_drive" in done.err and "synapse matrix explain embed" in done.err
