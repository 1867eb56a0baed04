"""Canonical bytes, digest and validation of manifest.json."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import manifest
from engines.bundle.manifest import BundleError

DIGEST = "sha256:" + "ab" * 32
LAYER = {"in_features": 32, "out_features": 64, "activation": "Tanh"}


GGUF = {"format": "gguf", "path": "model.gguf", "digest": DIGEST, "bytes": 123, "dtype": "f32"}
COREML = {"format": "coreml", "path": "m.mlpackage", "digest": DIGEST, "dtype": "f16"}
FUNCTIONS = [{"name": "s128", "bucket": 128}, {"name": "packed256", "packed_width": 256}]


def dense(*layers: Any, path: str = "dense.safetensors") -> dict[str, Any]:
    return {"path": path, "digest": DIGEST, "layers": list(layers)}


def toy(**changes: Any) -> dict[str, Any]:
    """The manifest of interfaces.md, with changes; a value of None removes the key."""
    obj: dict[str, Any] = {
        "manifest_version": 1,
        "model_id": "toy",
        "family": "bert",
        "task": "embed",
        "dims": 64,
        "max_tokens": 256,
        "pooling": "mean",
        "normalize": True,
        "tokenizer": {"path": "tokenizer.json", "digest": DIGEST},
        "artifacts": [GGUF],
    }
    obj.update(changes)
    return {key: value for key, value in obj.items() if value is not None}


def encode(obj: Any) -> bytes:
    return json.dumps(obj, ensure_ascii=False).encode()


def parsed(**changes: Any) -> manifest.Manifest:
    return manifest.parse(encode(toy(**changes)))[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO")
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "nothing"])
def test_a_manifest_that_is_no_plain_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "manifest.json"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    with pytest.raises(BundleError, match=r"is not a model bundle: manifest\.json: \w"):
        manifest.read(tmp_path)


def test_a_manifest_without_end_is_not_read_to_the_end(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="more than 4194304 bytes"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("size", [65535, 65536, 65537, 200_000])
def test_a_long_manifest_is_read_to_its_end(tmp_path: Path, size: int) -> None:
    short = encode(toy(license=""))
    data = encode(toy(license="x" * (size - len(short))))
    assert len(data) == size
    (tmp_path / "manifest.json").write_bytes(data)
    assert manifest.read(tmp_path).digest == manifest.parse(data)[1]


def test_canonical_bytes_are_sorted_tight_utf8_without_a_newline() -> None:
    data = manifest.canonical_bytes({"b": 1, "a": "é", "A": ["x", True, None]})
    assert data == '{"A":["x",true,null],"a":"é","b":1}'.encode()


def test_the_digest_ignores_layout_and_key_order() -> None:
    obj = toy(chat_template="über\n")
    shuffled = {key: obj[key] for key in reversed(obj)}
    loose = json.dumps(shuffled, indent=4, ensure_ascii=True).encode()
    for data in (loose, encode(obj)):
        assert manifest.parse(data)[1] == hashlib.sha256(manifest.canonical_bytes(obj)).hexdigest()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abÄ€\0", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=4), json_values, max_size=6))
def test_canonical_bytes_survive_a_round_trip(obj: dict[str, Any]) -> None:
    data = manifest.canonical_bytes(obj)
    assert manifest.parse_strict(data) == (obj, data)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b'{"a":1,"a":1}', "'a' occurs twice"),
        (b'{"a":{"b":1,"b":2}}', "'b' occurs twice"),
        (b'{"a":1.0}', "not an integer"),
        (b'{"a":1e3}', "not an integer"),
        (b'{"a":NaN}', "not an integer"),
        (b'{"a":-Infinity}', "not an integer"),
        (b'{"a":"\\ud800"}', "not valid JSON"),
        (b"[]", "one JSON object"),
        (b"", "not valid JSON"),
        (b'{"a":1} x', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "more than 64 bits"),
        (b'{"a":' + b"9" * 401 + b"}", "more than 64 bits"),
        (b'{"a":18446744073709551616}', "more than 64 bits"),
        (b'{"a":-9223372036854775809}', "more than 64 bits"),
        (b'{"a":1e999}', "not an integer"),
    ],
)
def test_anything_but_one_strict_object_is_refused(data: bytes, part: str) -> None:
    with pytest.raises(BundleError, match=part):
        manifest.parse_strict(data)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pooling": None}, "pooling"),
        ({"normalize": None}, "normalize"),
        ({"pooling": "max"}, "pooling"),
        ({"task": "rerank"}, "score"),
        ({"task": "rerank", "score": "sigmoid"}, "dims"),
        ({"artifacts": []}, "artifacts"),
        ({"dims": 0}, "dims"),
        ({"dims": True}, "dims"),
        ({"dims": 2**32}, "dims"),
        ({"special_ids": {"cls": -1}}, "special_ids"),
        ({"special_ids": {"cls": 2**31}}, "special_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"family": "../t5"}, "family"),
        ({"manifest_version": 2}, "manifest_version"),
        ({"model_id": "../x"}, "model_id"),
        ({"extra": 1}, "extra"),
        ({"model_id": None}, "model_id"),
        ({"default_prompt": "query"}, "default_prompt"),
        ({"default_prompt": "query", "prompts": {"passage": "passage: "}}, "default_prompt"),
        ({"prompts": {"query": 1}}, "prompts"),
        ({"dense": dense()}, "dense"),
        ({"dense": dense({**LAYER, "out_features": 63})}, "dense"),
        ({"dense": dense(LAYER, LAYER)}, "dense"),
        ({"dense": dense({**LAYER, "in_features": 0})}, "in_features"),
        ({"dense": dense({**LAYER, "out_features": 1}), "task": "rerank", "score": "sigmoid", "dims": 1}, "dense"),
        ({"artifacts": [GGUF, {**GGUF, "path": "b.gguf"}]}, r"artifacts\[1\].dtype"),
        ({"artifacts": [COREML]}, "tree digest"),
        *(({"tokenizer": {"path": "t", "digest": digest}}, "digest")
          for digest in ("", "ab" * 32, "sha256:" + "AB" * 32, "sha256:ab", "md5:" + "ab" * 32)),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(BundleError, match=key):
        parsed(**changes)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "", "a\\b", "C:/x", "C:x", "a\0b", "..", "//server/share"]
)
@pytest.mark.parametrize("place", ["artifacts", "tokenizer", "fixtures", "dense"])
def test_no_file_reference_leaves_the_bundle(path: str, place: str) -> None:
    ref = {"path": path, "digest": DIGEST}
    changes: dict[str, Any] = {place: ref}
    if place == "artifacts":
        changes = {place: [{**ref, "format": "gguf", "dtype": "f32"}]}
    elif place == "dense":
        changes = {place: dense(LAYER, path=path)}
    with pytest.raises(BundleError, match=rf"{place}.*relative path inside the bundle"):
        parsed(**changes)


def test_behind_dense_layers_the_worker_has_a_width_of_its_own() -> None:
    plain = parsed()
    assert (plain.worker_dims, plain.worker_normalizes) == (64, True)
    found = parsed(dense=dense({**LAYER, "in_features": 7, "out_features": 32}, LAYER))
    assert (found.worker_dims, found.dims, found.worker_normalizes) == (7, 64, False)
    assert not parsed(normalize=False).worker_normalizes


def test_read_gives_root_digest_and_artifacts_in_order(tmp_path: Path) -> None:
    others = [{**GGUF, "path": "b.gguf", "dtype": "f16"}, {**COREML, "tree": DIGEST, "functions": FUNCTIONS}]
    written = parsed(artifacts=[GGUF, *others], special_ids={"pad": 0, "eos": 2**31 - 1}, dims=2**32 - 1)
    digest = manifest.write(tmp_path, written)
    for place in (tmp_path, tmp_path / "manifest.json", str(tmp_path)):
        bundle = manifest.read(place)
        assert bundle.digest == digest == hashlib.sha256((tmp_path / "manifest.json").read_bytes()).hexdigest()
        assert bundle.manifest == written
        assert bundle.path("model.gguf") == tmp_path / "model.gguf"
        assert [artifact.path for artifact in bundle.artifacts("gguf")] == ["model.gguf", "b.gguf"]
        assert bundle.artifacts("onnx") == []


def test_write_refuses_what_read_would_refuse(tmp_path: Path) -> None:
    from msgspec.structs import replace

    written = parsed()
    with pytest.raises(BundleError, match="pooling"):
        manifest.write(tmp_path, replace(written, pooling=manifest.UNSET))
    with pytest.raises(BundleError, match="not an integer"):
        manifest.write(tmp_path, replace(written, config={"eps": 1e-12}))
    assert not (tmp_path / "manifest.json").exists()
