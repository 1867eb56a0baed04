"""What a machine can be certified for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from engines.bundle import manifest
from synapse_host.certification import run as orders
from synapse_host.placement import hardware
from synapse_host.placement.matrix import load
from synapse_host.placement.probe import Floor
from tests.support.small_bundle import write_bundle


def test_every_engine_and_model_once_and_engines_that_no_lane_names(tmp_path: Path) -> None:
    formats = {"gguf": "f16", "safetensors-package": "f32"}
    paths = {
        task: write_bundle(tmp_path / task, task=task, formats=formats) for task in ("embed", "rerank", "generate")
    }
    paths["small"] = write_bundle(tmp_path / "small", formats={"safetensors-package": "int8"})
    bundles = {name: manifest.read(path) for name, path in paths.items()}
    floors = {key: Floor("ok", "ok") for key in ("llama:cpu", "cuda:cpu")}
    features = frozenset({"avx2", "avx512_vnni"})
    profile = dataclasses.replace(
        hardware.detect(), os="linux", arch="x86_64", cpu_features=features, floors=floors, nvidia_models=()
    )
    matrix = load()
    found, wide = orders.possible(matrix, bundles, profile)
    got = [(order.model, order.lane, order.engine) for order in found]
    assert sorted(got) == [
        ("embed", "embed", "llama-cpu"), ("embed", "embed", "onnx-cpu"), ("generate", "generate", "llama-cpu"),
        ("rerank", "rerank", "llama-cpu"), ("rerank", "rerank", "onnx-cpu"), ("small", "embed", "onnx-cpu-int8"),
    ]  # fmt: skip
    assert "onnx-cpu-int8" in wide.lanes["embed"].engines and "onnx-cpu-int8" not in matrix.lanes["embed"].engines
    assert "onnx-cpu-int8" not in wide.lanes["generate"].engines
    # A lane may have any name, also another task's.
    names = {"rerank": "embed", "mine": "rerank"}
    lanes = {name: msgspec.structs.replace(matrix.lanes[of], id=name) for name, of in names.items()}
    _, renamed = orders.possible(msgspec.structs.replace(matrix, lanes=lanes), bundles, profile)
    assert "onnx-cpu-int8" in renamed.lanes["mine"].engines
    # Without the instructions, or without the engine's library, there is nothing to order.
    plain = dataclasses.replace(profile, cpu_features=frozenset(), floors={"llama:cpu": floors["llama:cpu"]})
    assert {order.engine for order in orders.possible(matrix, bundles, plain)[0]} == {"llama-cpu"}
    # A lane that is pinned serves by one engine; the others are certified all the same.
    pinned = msgspec.structs.replace(matrix.lanes["embed"], pin="llama-cpu")
    again, _ = orders.possible(
        msgspec.structs.replace(matrix, lanes={**matrix.lanes, "embed": pinned}), bundles, profile
    )
    assert [(order.model, order.lane, order.engine) for order in again] == got


def test_a_folder_names_a_kind_of_machine() -> None:
    intel = orders.folder_of("llama-cpu", chip="Intel(R) Xeon(R) CPU @ 2.10GHz", os="linux", os_version="6.8.0-1")
    assert intel == "llama-cpu-intel-xeon-linux"
    assert (
        orders.folder_of("ane", chip="Apple M4 Pro", os="darwin", os_version="15.1") == "ane-apple-m4-pro-darwin-15.1"
    )
