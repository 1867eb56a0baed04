from __future__ import annotations

import copy
import functools
import json
import operator
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from synapse_host.errors import MatrixInvalid
from synapse_host.placement.matrix import default_path, json_schema, load

SCHEMA = json_schema()

VALID = """\
version: 1
hardware:
  any: {}
  nvidia: {os: [linux, windows], min_driver_api: 13000, min_compute_capability: "7.5"}
engines:
  toy: {engine: llama, device: cpu, format: gguf, requires: any, runtime_config: {threads: "2"}}
  scripted: {engine: llama, device: cpu, format: gguf, requires: any, worker: {command: [python3, worker.py, silent]}}
  onnx: {engine: cuda, device: cpu, format: safetensors-package, requires: any}
lanes:
  embed: {task: embed, engines: [toy]}
  odd:   {task: embed, engines: [scripted], kind: legacy}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return path


def test_the_shortest_valid_file_of_the_interface(tmp_path: Path) -> None:
    matrix = load(write(tmp_path, VALID))
    assert matrix.engines["toy"].runtime_config == {"threads": "2"}
    assert matrix.engines["scripted"].command == ("python3", "worker.py", "silent")
    assert matrix.lanes["embed"].kind == "catalog" and matrix.lanes["odd"].kind == "legacy"
    assert matrix.hardware["nvidia"].min_compute_capability == "7.5"
    assert matrix.lanes["odd"].line == 11


def test_the_packaged_matrix_is_valid_and_complete() -> None:
    matrix = load()
    assert {"apple-silicon", "nvidia", "x86-64", "arm64", "any"} <= set(matrix.hardware)
    assert matrix.hardware["x86-64-avx2"].cpu_features and matrix.hardware["arm64-dotprod"].cpu_features
    assert set(matrix.engines) == {"ane", "cuda", "onnx-cpu", "onnx-cpu-int8", "llama-metal", "llama-cpu"}
    assert set(matrix.lanes) == {"embed", "rerank", "generate", "quiet"}
    assert matrix.lanes["quiet"].engines[0] == "ane"
    # onnx-cpu was the faster one on every processor measured (docs/performance.md).
    for lane in ("embed", "rerank"):
        assert [id for id in matrix.lanes[lane].engines if id.endswith("-cpu")] == ["onnx-cpu", "llama-cpu"]
    assert matrix.threshold("ane", "placement", "share") == 0.90
    markers = {engine.id: engine.pytest_marker for engine in matrix.engines.values() if engine.pytest_marker}
    assert markers == {"ane": "ane", "cuda": "cuda", "llama-metal": "metal", "llama-cpu": "llama"}


def test_every_key_is_documented_in_the_packaged_file() -> None:
    text = default_path().read_text()
    comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    for section in ("HardwareKeys", "EngineKeys", "LaneKeys"):
        for key in SCHEMA["$defs"][section]["properties"]:
            assert key in comments, f"{section}: {key}"


ERRORS = [
    # (replace, by, the last occurrence of this is the place, words)
    ("engines: [toy]", "engins: [toy]", "engins", ["lanes.embed.engins: unknown key", "did you mean 'engines'?"]),
    ("engines: [toy]", "engines: [toi]", "toi", ["lanes.embed.engines[0]", "no engine 'toi'", "did you mean 'toy'?"]),
    ("lanes:", "lains:", "lains", ["lains: unknown key (did you mean 'lanes'?)"]),
    ("task: embed, engines: [toy]", "task: embedd, engines: [toy]", "embedd", ["lanes.embed.task", "mean 'embed'?"]),
    ("any: {}", "no: {}", "no: {}", ["reads this key as a boolean", '"no"']),
    ("any: {}", "any: {}\n  any: {}", "any: {}", ["the key 'any' occurs twice", "line 3"]),
    ('threads: "2"', "threads: 2", "2}", ["engines.toy.runtime_config.threads", 'write it in quotes: "2"']),
    ("version: 1", "version: 2", "2\nhardware", ["version", "unknown value '2'; known: 1"]),
    ("device: cpu", "device: ane", "ane,", ["engines.toy.device", "runs on cpu or cuda or metal, not ane"]),
    ("format: gguf", "format: coreml", "coreml", ["reads gguf, not coreml"]),
    ("kind: legacy", "kind: legacy, pin: toy", "toy}", ["lanes.odd.pin", "no engine of this lane 'toy'"]),
    ("engines: [toy]", "engines: toy", "toy}", ["must be a list, got a word; it is 'toy'"]),
    ("engines: [toy]", "engines: [toy, toy]", "toy]", ["'toy' is listed twice"]),
    ("any: {}", "any: &x {}\n  more: *x", "&x", ["anchors and aliases are not supported"]),
    ("any: {}", "any: !!python/object/apply:os.system ['x']", "!!", ["is not supported"]),
    ("any: {}", "any: {", "engines:\n", ["not valid YAML"]),
    ("task: embed, engines: [toy]", "task: generate, engines: [odd]", "odd]", ["no engine 'odd'"]),
    ("task: embed, engines: [toy]", "task: generate, engines: [onnx]", "onnx]", ["onnx can't generate; it serves"]),
    ("engines: [toy]", "engines: [{}]", "{}]", ["lanes.embed.engines[0]: must be a word, got a mapping"]),
    ("any: {}", "1: {}", "1: {}", ["a key must be a word", '"1"']),
    ("any: {}", "<<: {}", "<<", ["merge keys (<<) are not supported"]),
    ("any: {}", "a b: {}", "a b: {}", ["the name 'a b' must match"]),
    ("min_driver_api: 13000", "min_driver_api: 0x10", "0x10", ["not a plain decimal number"]),
]


@pytest.mark.parametrize(("old", "new", "place", "words"), ERRORS, ids=[f"{new[:40]}" for _, new, _, _ in ERRORS])
def test_an_error_names_the_place_the_key_and_the_nearest_valid_one(
    tmp_path: Path, old: str, new: str, place: str, words: list[str]
) -> None:
    assert VALID.count(old) >= 1
    text = VALID.replace(old, new, 1)
    path = write(tmp_path, text)
    before = text[: text.rindex(place)]
    place = f"{before.count(chr(10)) + 1}:{len(before) - (before.rfind(chr(10)) + 1) + 1}"
    with pytest.raises(MatrixInvalid) as caught:
        load(path)
    message = caught.value.message
    assert f"m.yaml:{place}: " in message, message
    for word in words:
        assert word in message, message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, r"m\.yaml:\d+:\d+: ") for text in (b"", b"just text", b"- a\n- b", b"\xff\xfe", b"a: [1, 2", b"{}")),
        (b"version: 1\n" * 3, "occurs twice"),
        (b"[" * 200_000, "not valid YAML"),
        (b"#" * 1_000_000, "more than 262144 bytes"),
        (b"version: " + b"1" * 401, "not a plain decimal number"),
    ],
)
def test_what_is_no_matrix_at_all_is_refused_at_once(tmp_path: Path, text: bytes, words: str) -> None:
    started = time.process_time()
    (tmp_path / "m.yaml").write_bytes(text)
    with pytest.raises(MatrixInvalid, match=words):
        load(tmp_path / "m.yaml")
    assert time.process_time() - started < 3  # 17 s for a list of 1 MB
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(MatrixInvalid, match="can't be read"):
            load(path)


def test_an_engine_overrides_single_thresholds(tmp_path: Path) -> None:
    text = VALID.replace('runtime_config: {threads: "2"}', "thresholds: {embed: {min_cosine: 0.9}}")
    matrix = load(write(tmp_path, text + "thresholds: {embed: {min_cosine: 0.99, mean_cosine: 0.999}}\n"))
    assert matrix.threshold("toy", "embed", "min_cosine") == 0.9
    assert matrix.threshold("toy", "embed", "mean_cosine") == 0.999
    assert matrix.threshold("scripted", "embed", "min_cosine") == 0.99
    assert matrix.threshold("toy", "rerank", "pearson") is None
    assert matrix.engines["toy"].worker_engine == "llama.cpp-worker" and matrix.engines["toy"].device_kind == "cpu"


OTHERS: list[Any] = [None, True, 1, 2.5, "x", "x y", "1.5", [], ["x"], {}, {"x": "1"}, {"x": 1}]
ACROSS = re.compile("no (hardware class|engine)|engine llama (reads|runs on)")
"""References between sections are beyond a schema."""


def variants(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document in which one value is another, is missing, or has a neighbour with another name."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        yield path, value
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in pairs:
            yield from walk(inner, (*path, key))

    def bent(path: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
        """Return a copy of the document, and what it has there."""
        made = copy.deepcopy(document)
        return made, functools.reduce(operator.getitem, path, made)

    for path, value in walk(document, ()):
        for other in OTHERS if path else ():
            made, place = bent(path[:-1])
            place[path[-1]] = other
            yield f"{path} {other}", made
        if isinstance(value, dict):
            made, place = bent(path)
            place["an other"] = 1
            yield f"{path} another", made
        if path and isinstance(path[-1], str):
            made, place = bent(path[:-1])
            del place[path[-1]]
            yield f"{path} missing", made


FULL = {
    "version": 1,
    "hardware": {"any": {"os": ["linux"], "arch": "arm64", "min_os": "14.4", "min_driver_api": 13000,
                         "min_compute_capability": "7.5", "neural_engine": True, "cpu_features": ["avx2"]}},
    "engines": {"toy": {"engine": "llama", "device": "cuda:1", "format": "gguf", "requires": "any", "dtype": ["f16"],
                        "kernel_revision": "r1", "pytest_marker": "cuda", "env": {"A_B": "1"},
                        "runtime_config": {"threads": "1"}, "worker": {"command": ["a", "a"]},
                        "thresholds": {"embed": {"min_cosine": 0.99}, "placement": {"speedup": 1.5}}}},
    "lanes": {"embed": {"task": "embed", "engines": ["toy"], "kind": "legacy", "pin": "toy", "choose": "fastest",
                        "require_certificate": True}},
    "thresholds": {"rerank": {"max_error": 0.1, "pearson": 1}},
}  # fmt: skip
"""Every key once."""


def test_the_schema_and_the_code_agree_about_every_value(tmp_path: Path) -> None:
    schema, verdicts = jsonschema.Draft202012Validator(SCHEMA), set()
    for name, document in [("full", FULL), ("packaged", yaml.safe_load(default_path().read_text())), *variants(FULL)]:
        by_code = True
        try:
            load(write(tmp_path, json.dumps(document)))
        except MatrixInvalid as exc:
            by_code = bool(ACROSS.search(exc.message))
            assert re.search(r"m\.yaml:\d+:\d+: ", exc.message) and "[...]" not in exc.message, exc.message
        assert schema.is_valid(document) == by_code, name
        verdicts.add((name in ("full", "packaged"), by_code))
    assert verdicts == {(True, True), (False, True), (False, False)}
