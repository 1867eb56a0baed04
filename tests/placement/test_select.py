from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engines.bundle.manifest import Bundle, read
from synapse_host.errors import SynapseError
from synapse_host.placement.hardware import HostProfile, floor_keys
from synapse_host.placement.matrix import Hardware, HardwareMatrix, load
from synapse_host.placement.probe import Floor
from synapse_host.placement.select import dtype_order, floor_text, hardware_reason, lane_with, pinned, select
from tests.support.small_bundle import write_bundle, write_matrix

OK = Floor("ok", "ok")
CUDA_OK = Floor("ok", "ok", observed={"driver_api": 13000, "compute_capability": {"major": 9, "minor": 0}})
NO_DRIVER = Floor("refused", "cuda_no_driver", required={"driver_api": 13000})

LINUX = HostProfile(
    os="linux", arch="x86_64", os_version="6.1", os_build="6.1", cpu_model="x",
    cpu_features=frozenset({"avx2", "avx512_bf16"}), cores=2, cores_total=2, quota=None, ram_total=1, ram_free=1,
    floors={"llama:cpu": OK, "cuda:cpu": OK, "cuda:cuda": NO_DRIVER},
)  # fmt: skip
OLD_CPU = dataclasses.replace(LINUX, cpu_features=frozenset({"avx2"}))
FP16_CPU = dataclasses.replace(LINUX, cpu_features=frozenset({"avx2", "avx512_bf16", "avx512_fp16"}))
MAC = dataclasses.replace(
    LINUX, os="darwin", arch="arm64", os_version="15.1", floors={"llama:cpu": OK, "llama:metal": OK, "ane:ane": OK}
)
BROKEN = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("failed", "probe_timeout", why="its probe hung")})
NO_DEVICE = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("ok", "ok", observed={"driver_api": 13000})})
UNASKED = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("refused", "cuda_runtime_missing:cuda-python")})
H200 = dataclasses.replace(LINUX, floors={**LINUX.floors, "cuda:cuda": CUDA_OK})


BOTH = {"gguf": "f16", "safetensors-package": "f32"}


@pytest.fixture(scope="module")
def matrix() -> HardwareMatrix:
    """The shipped engines in an order of this file's own: which of them comes first is not what is tested here."""
    shipped = load()
    order = ["ane", "cuda", "llama-metal", "llama-cpu", "onnx-cpu"]
    lanes = {
        name: replace(shipped.lanes[name], engines=[id for id in order if id in shipped.lanes[name].engines])
        for name in ("embed", "quiet")
    }
    return replace(shipped, lanes={**shipped.lanes, **lanes})


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read(write_bundle(tmp_path / "b", formats=BOTH))


def floored(floor: Floor | None) -> HostProfile:
    """LINUX, where llama-cpu's own probe said something else, or was never asked."""
    others = {key: value for key, value in LINUX.floors.items() if key != "llama:cpu"}
    return dataclasses.replace(LINUX, floors=others if floor is None else {**others, "llama:cpu": floor})


PLACED: list[tuple[dict[str, Any], str | None, dict[str, str]]] = [
    # the machine, the lane, formats of the bundle, changes to the matrix; the engine; what is said of each
    ({}, "llama-cpu", {"ane": "hardware apple-silicon: os is linux, needs darwin",
                       "cuda": "hardware nvidia: no NVIDIA driver",
                       "llama-cpu": "bundle toy has format gguf (f16)", "onnx-cpu": "not reached"}),
    ({"lane": "rerank"}, "onnx-cpu", {}),
    ({"lane": "quiet"}, "llama-cpu", {}),
    ({"profile": H200}, "cuda", {}),
    # A Mac's Neural Engine is passed over by format.
    ({"profile": MAC}, "llama-metal", {"ane": "bundle toy has no format coreml (has: gguf, safetensors-package)"}),
    ({"profile": MAC, "lane": "quiet"}, "llama-cpu", {}),
    ({"profile": dataclasses.replace(MAC, os_version="14.3")}, "llama-cpu", {}),
    ({"formats": {"onnx": "f32"}}, None, {"llama-cpu": "bundle toy has no format gguf", "onnx-cpu": "no format"}),
    ({"pin": "onnx-cpu"}, "onnx-cpu", {"llama-cpu": "the lane is pinned to onnx-cpu"}),
    ({"pin": "cuda"}, None, {"llama-cpu": "the lane is pinned to cuda", "cuda": "no NVIDIA driver"}),
    # Its own probe says no.
    ({"profile": floored(Floor("refused", "llama_missing"))}, "onnx-cpu",
     {"llama-cpu": "llama-cpp-python is not installed"}),
    ({"profile": floored(Floor("refused", "cpu_unsupported"))}, "onnx-cpu", {"llama-cpu": "built for another CPU"}),
    ({"profile": floored(Floor("failed", "probe_timeout", why="it hung"))}, "onnx-cpu", {"llama-cpu": "it hung"}),
    ({"profile": floored(Floor("refused", "something_new"))}, "onnx-cpu", {"llama-cpu": "something_new"}),
    ({"profile": floored(None)}, "onnx-cpu", {"llama-cpu": "was not probed"}),
    # A dtype list limits what is taken; int8 is taken where it is asked for, on a CPU only.
    ({"dtype": ["q8_0", "f32"]}, "onnx-cpu", {"llama-cpu": "bundle toy has gguf in f16, the engine takes q8_0, f32"}),
    ({"profile": H200, "formats": {"safetensors-package": "int8"}}, None,
     {"cuda": "has safetensors-package in int8, the engine takes int8 only where its dtype list says so"}),
    ({"profile": H200, "formats": {"safetensors-package": "int8"}, "dtype": ["int8"]}, "onnx-cpu",
     {"cuda": "the engine takes int8 (int8 on a CPU only)", "onnx-cpu": "(int8)"}),
    # What the processor does fastest.
    ({"formats": {"gguf": "bf16"}}, "llama-cpu", {"llama-cpu": "has format gguf (bf16); cpu has avx512-bf16"}),
    ({"formats": {"gguf": "bf16"}, "profile": OLD_CPU}, "llama-cpu", {"llama-cpu": "toy has format gguf (bf16)"}),
    ({"formats": {"gguf": "f32"}, "profile": FP16_CPU}, "llama-cpu",
     {"llama-cpu": "has format gguf (f32); fastest on a cpu with avx512-fp16"}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "engine", "reasons"), PLACED)
def test_the_first_that_fits_is_placed_and_every_other_one_has_its_reason(
    case: dict[str, Any], engine: str | None, reasons: dict[str, str], matrix: HardwareMatrix, tmp_path: Path
) -> None:
    lane, dtype = case.get("lane", "embed"), tuple(case.get("dtype", ()))
    engines = {id: replace(one, dtype=dtype) if dtype else one for id, one in matrix.engines.items()}
    lanes = {**matrix.lanes, lane: replace(matrix.lanes[lane], pin=case.get("pin"))}
    bundle = read(write_bundle(tmp_path / "b", formats=case.get("formats", BOTH)))
    changed = replace(matrix, engines=engines, lanes=lanes)
    found = select(changed, lane_id=lane, profile=case.get("profile", LINUX), bundle=bundle)
    assert found.engine == engine and (found.artifact is None) == (engine is None)
    verdicts = {item.engine: item.verdict for item in found.considered}
    assert list(verdicts.values()).count("yes") == (engine is not None) and verdicts.get(engine or "", "yes") == "yes"
    assert ("not_reached" in verdicts.values()) == (engine is not None and engine != list(verdicts)[-1])
    for id, words in reasons.items():
        said = next(item.reason for item in found.considered if item.engine == id)
        assert said.endswith(words) if words.endswith(")") else words in said
        assert engine is not None or f"{id}: {said}" in found.why_not()


@pytest.mark.parametrize(
    ("speeds", "order", "reasons"),
    [
        ({}, ["llama-cpu", "onnx-cpu"], {}),
        ({"onnx-cpu": 900.0}, ["onnx-cpu", "llama-cpu"], {"onnx-cpu": "(f32); certified here at 900 tokens/s"}),
        ({"onnx-cpu": 900.0, "llama-cpu": 1200.4}, ["llama-cpu", "onnx-cpu"],
         {"onnx-cpu": "not reached; certified here at 900 tokens/s", "llama-cpu": "certified here at 1,200 tokens/s"}),
        # The fastest by far doesn't fit here any more.
        ({"cuda": 1e6, "onnx-cpu": 900.0}, ["onnx-cpu", "llama-cpu"], {"cuda": "no NVIDIA driver; certified here"}),
    ],
)  # fmt: skip
def test_a_lane_may_choose_the_fastest_of_what_was_certified_here(
    matrix: HardwareMatrix, bundle: Bundle, speeds: dict[str, float], order: list[str], reasons: dict[str, str]
) -> None:
    lanes = {**matrix.lanes, "embed": replace(matrix.lanes["embed"], choose="fastest")}
    fastest = replace(matrix, lanes=lanes)
    profile = dataclasses.replace(LINUX, speeds={bundle.digest: speeds})
    found = select(fastest, lane_id="embed", profile=profile, bundle=bundle)
    said = {item.engine: item.reason for item in found.considered}
    assert [id for id in said if id.endswith("-cpu")] == order and found.engine == order[0]
    for engine, words in reasons.items():
        assert words in said[engine]
    # Another lane, another bundle's figures and no bundle at all keep the order.
    assert select(matrix, lane_id="embed", profile=profile, bundle=bundle).engine == "llama-cpu"
    others = dataclasses.replace(LINUX, speeds={"another": speeds})
    assert select(fastest, lane_id="embed", profile=others, bundle=bundle).engine == "llama-cpu"
    assert select(fastest, lane_id="embed", profile=profile).engine == "llama-cpu"


CHOSEN: list[tuple[dict[str, str], str]] = [
    # lane and engine that a caller asks for; the error
    ({"embed": "typo"}, "invalid_request: lane embed has no engine 'typo' (fit here: llama-cpu, onnx-cpu)"),
    ({"quiet": "cuda"}, "invalid_request: lane quiet has no engine 'cuda' (fit here: llama-cpu, onnx-cpu)"),
    ({"embed": "cuda"}, "backend_missing: lane embed: cuda can't be used: hardware nvidia: no NVIDIA driver (fit here: "
     "llama-cpu, onnx-cpu)"),
    ({"nothing": "cuda"}, "invalid_request: no lane 'nothing' (have: embed, rerank, generate, quiet)"),
]  # fmt: skip


def test_a_caller_may_choose_the_engine_of_a_lane(matrix: HardwareMatrix, bundle: Bundle) -> None:
    chosen = pinned(matrix, {"embed": "onnx-cpu"}, profile=LINUX, bundles=[bundle])
    placed = {lane: select(chosen, lane_id=lane, profile=LINUX, bundle=bundle).engine for lane in ("embed", "quiet")}
    assert placed == {"embed": "onnx-cpu", "quiet": "llama-cpu"}
    assert lane_with(matrix, "embed", "cuda") == "embed" and lane_with(matrix, "embed", "no such") == "embed"
    listed = replace(matrix.lanes["embed"], engines=["llama-cpu"])
    assert lane_with(replace(matrix, lanes={**matrix.lanes, "embed": listed}), "embed", "onnx-cpu") == "quiet"
    # A host without a model of the task has nothing that could fit; the lane is simply not used.
    assert pinned(matrix, {"rerank": "cuda"}, profile=LINUX, bundles=[bundle]).lanes["rerank"].pin == "cuda"


@pytest.mark.parametrize(("engines", "said"), CHOSEN)
def test_an_engine_that_cannot_be_chosen_is_refused_with_those_that_can(
    engines: dict[str, str], said: str, matrix: HardwareMatrix, bundle: Bundle
) -> None:
    with pytest.raises(SynapseError) as caught:
        pinned(matrix, engines, profile=LINUX, bundles=[bundle])
    assert f"{caught.value.code}: {caught.value.message}" == said


def at(os_version: str, profile: HostProfile = MAC) -> HostProfile:
    return dataclasses.replace(profile, os_version=os_version)


@pytest.mark.parametrize(
    ("condition", "profile", "reason"),
    [
        ({}, LINUX, None),
        ({"arch": ("arm64",)}, LINUX, "arch is x86_64, needs arm64"),
        ({"os": ("darwin", "windows")}, LINUX, "os is linux, needs darwin or windows"),
        ({"min_os": "14.4"}, at("14.4.0"), None),
        ({"min_os": "14.4"}, at("14.10"), None),
        ({"min_os": "14.4"}, at("14.3.9"), "macOS is 14.3.9, needs 14.4"),
        ({"min_os": "6.1"}, at("6.1.0-rc12", LINUX), None),
        ({"min_os": "6.2"}, at("odd", LINUX), "Linux is odd, needs 6.2"),
        ({"cpu_features": ("avx2", "amx")}, LINUX, "cpu lacks amx"),
        ({"neural_engine": True}, LINUX, "no Neural Engine"),
        ({"neural_engine": False}, MAC, "a Neural Engine is present"),
        ({"min_driver_api": 13000}, H200, None),
        ({"min_driver_api": 13010}, H200, "driver API is 13000, needs 13010"),
        ({"min_compute_capability": "7.5"}, H200, None),
        ({"min_compute_capability": "9.0"}, H200, None),
        ({"min_compute_capability": "10.0"}, H200, "compute capability is 9.0, needs 10.0"),
        ({"min_compute_capability": "7.5"}, LINUX, "no NVIDIA driver"),
        ({"min_driver_api": 1}, BROKEN, "its probe hung"),
        ({"min_compute_capability": "7.5"}, NO_DEVICE, "no device"),
        ({"min_driver_api": 1}, UNASKED, "a library is missing: cuda-python"),
    ],
)
def test_hardware_conditions(condition: dict[str, Any], profile: HostProfile, reason: str | None) -> None:
    assert hardware_reason(Hardware(id="h", **condition), profile) == (reason and f"hardware h: {reason}")


@pytest.mark.parametrize(
    ("engine", "profile", "have", "order"),
    [
        ("llama-cpu", LINUX, ["f16", "bf16", "q8_0"], ["bf16", "f16", "q8_0"]),
        ("llama-cpu", OLD_CPU, ["bf16", "f16", "q8_0"], ["f16", "q8_0", "bf16"]),
        ("llama-cpu", OLD_CPU, ["bf16"], ["bf16"]),
        ("llama-cpu", FP16_CPU, ["f16", "bf16", "f32"], ["f32", "f16", "bf16"]),
        ("llama-cpu", LINUX, ["f32", "f16"], ["f16", "f32"]),
        ("llama-cpu", LINUX, ["q4_1"], ["q4_1"]),
        ("llama-metal", MAC, ["bf16", "f16"], ["f16", "bf16"]),
        ("onnx-cpu", LINUX, ["f16", "f32"], ["f32", "f16"]),
        ("cuda", H200, ["f32", "f16"], ["f16", "f32"]),
        ("onnx-cpu", LINUX, ["int8", "f32"], ["f32"]),
        ("onnx-cpu-int8", LINUX, ["int8", "f32"], ["int8"]),
        ("onnx-cpu", LINUX, ["int8"], []),
        ("cuda", H200, ["int8", "f32"], ["f32"]),
        ("ane", MAC, ["f32"], []),
    ],
)
def test_dtype_preference(
    matrix: HardwareMatrix, engine: str, profile: HostProfile, have: list[str], order: list[str]
) -> None:
    assert dtype_order(matrix.engines[engine], profile, have) == order


def test_foreign_workers_are_not_probed(tmp_path: Path) -> None:
    matrix = load(write_matrix(tmp_path))
    assert floor_keys(matrix, matrix.engines) == set()
    bare = dataclasses.replace(LINUX, floors={})
    assert select(matrix, lane_id="embed", profile=bare).engine == "scripted"


NEEDED = {"compute_capability": {"major": 7, "minor": 5}}
CAPABILITY = {"compute_capability": {"major": 6, "minor": 1}}


@pytest.mark.parametrize(
    ("floor", "text"),
    [
        (Floor("refused", "cuda_driver_too_old", {"driver_api": 13000}, {"driver_api": 12040}),
         "the NVIDIA driver is too old: API 12040, needs 13000"),
        (Floor("refused", "cuda_compute_capability_too_low", NEEDED, CAPABILITY),
         "the NVIDIA device is too old: 6.1, needs 7.5"),
        (Floor("refused", "cuda_compute_capability_too_low"), "the NVIDIA device is too old: unknown, needs unknown"),
        (Floor("refused", "cuda_runtime_missing:libcudnn.so.9"), "a library is missing: libcudnn.so.9"),
        (Floor("refused", "cuda_runtime_missing:onnxruntime-sm_100"),
         "onnxruntime-gpu has no machine code for this device (sm_100)"),
        (Floor("refused", "no_neural_engine"), "no Neural Engine"),
    ],
)  # fmt: skip
def test_a_floors_answer_in_words(floor: Floor, text: str) -> None:
    assert floor_text(floor) == text


def test_explaining_without_a_bundle_looks_at_hardware_only(matrix: HardwareMatrix) -> None:
    placement = select(matrix, lane_id="embed", profile=LINUX)
    assert placement.engine == "llama-cpu" and placement.artifact is None
    (yes,) = [item for item in placement.considered if item.verdict == "yes"]
    assert yes.to_dict() == {
        "engine": "llama-cpu", "verdict": "yes", "reason": "cpu is usable; the bundle needs format gguf",
    }  # fmt: skip
