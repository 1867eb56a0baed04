from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import Bundle, read
from synapse_host.placement.hardware import HostProfile, floor_keys
from synapse_host.placement.matrix import Hardware, HardwareMatrix, load
from synapse_host.placement.probe import Floor
from synapse_host.placement.select import dtype_order, floor_text, hardware_reason, select
from tests.support.small_bundle import write_bundle

OK = Floor("ok", "ok")
CUDA_OK = Floor("ok", "ok", observed={"driver_api": 13000, "compute_capability": {"major": 9, "minor": 0}})
NO_DRIVER = Floor("refused", "cuda_no_driver", required={"driver_api": 13000})

LINUX = HostProfile(
    os="linux",
    arch="x86_64",
    os_version="6.1",
    os_build="6.1",
    cpu_model="x",
    cpu_features=frozenset({"avx2", "avx512_bf16"}),
    cores=2,
    cores_total=2,
    quota=None,
    ram_total=1,
    ram_free=1,
    floors={"llama:cpu": OK, "cuda:cpu": OK, "cuda:cuda": NO_DRIVER},
)
OLD_CPU = dataclasses.replace(LINUX, cpu_features=frozenset({"avx2"}))
FP16_CPU = dataclasses.replace(LINUX, cpu_features=frozenset({"avx2", "avx512_bf16", "avx512_fp16"}))
MAC = dataclasses.replace(
    LINUX, os="darwin", arch="arm64", os_version="15.1", floors={"llama:cpu": OK, "llama:metal": OK, "ane:ane": OK}
)
BROKEN = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("failed", "probe_timeout", why="its probe hung")})
NO_DEVICE = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("ok", "ok", observed={"driver_api": 13000})})
UNASKED = dataclasses.replace(LINUX, floors={"cuda:cuda": Floor("refused", "cuda_runtime_missing:cuda-python")})
H200 = dataclasses.replace(LINUX, floors={**LINUX.floors, "cuda:cuda": CUDA_OK})


@pytest.fixture(scope="module")
def matrix() -> HardwareMatrix:
    """The shipped engines in an order of this file's own: which of them comes first is not what is tested here."""
    import msgspec

    shipped = load()
    order = ["ane", "cuda", "llama-metal", "llama-cpu", "onnx-cpu"]
    lanes = {
        name: msgspec.structs.replace(
            shipped.lanes[name], engines=[id for id in order if id in shipped.lanes[name].engines]
        )
        for name in ("embed", "quiet")
    }
    return msgspec.structs.replace(shipped, lanes={**shipped.lanes, **lanes})


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read(write_bundle(tmp_path / "b", formats={"gguf": "f16", "safetensors-package": "f32"}))


def verdicts(placement: Any) -> dict[str, str]:
    return {item.engine: item.verdict for item in placement.considered}


def test_first_match_wins_and_every_other_choice_has_its_reason(matrix: HardwareMatrix, bundle: Bundle) -> None:
    placement = select(matrix, lane_id="embed", profile=LINUX, bundle=bundle)
    assert placement.engine == "llama-cpu"
    assert placement.artifact is not None and placement.artifact.format == "gguf"
    reasons = {item.engine: item.reason for item in placement.considered}
    assert reasons["ane"] == "hardware apple-silicon: os is linux, needs darwin"
    assert reasons["cuda"] == "hardware nvidia: no NVIDIA driver"
    assert reasons["llama-cpu"] == "bundle toy has format gguf (f16)"
    assert reasons["onnx-cpu"] == "not reached"
    assert verdicts(placement) == {
        "ane": "no",
        "cuda": "no",
        "llama-metal": "no",
        "llama-cpu": "yes",
        "onnx-cpu": "not_reached",
    }


@pytest.mark.parametrize(
    ("profile", "lane", "engine"),
    [
        (LINUX, "rerank", "onnx-cpu"),
        (LINUX, "quiet", "llama-cpu"),
        (H200, "embed", "cuda"),
        (MAC, "embed", "llama-metal"),
        (MAC, "quiet", "llama-cpu"),
        (dataclasses.replace(MAC, os_version="14.3"), "embed", "llama-cpu"),
    ],
)
def test_machines(matrix: HardwareMatrix, bundle: Bundle, profile: HostProfile, lane: str, engine: str) -> None:
    """The bundle has gguf and safetensors but no Core ML, so a Mac's ANE is passed over by format."""
    placement = select(matrix, lane_id=lane, profile=profile, bundle=bundle)
    assert placement.engine == engine
    assert [item.verdict for item in placement.considered].count("yes") == 1


def test_a_format_the_bundle_lacks_is_passed_over(matrix: HardwareMatrix, bundle: Bundle) -> None:
    reasons = {i.engine: i.reason for i in select(matrix, lane_id="embed", profile=MAC, bundle=bundle).considered}
    assert reasons["ane"] == "bundle toy has no format coreml (has: gguf, safetensors-package)"


def test_nothing_fits(matrix: HardwareMatrix, tmp_path: Path) -> None:
    bundle = read(write_bundle(tmp_path / "c", formats={"onnx": "f32"}))
    placement = select(matrix, lane_id="embed", profile=LINUX, bundle=bundle)
    assert placement.engine is None and placement.artifact is None
    assert "not_reached" not in verdicts(placement).values()
    assert "llama-cpu: bundle toy has no format gguf" in placement.why_not()


def test_a_pin_means_this_engine_or_none(matrix: HardwareMatrix, bundle: Bundle) -> None:
    import msgspec

    lane = msgspec.structs.replace(matrix.lanes["embed"], pin="onnx-cpu")
    pinned = msgspec.structs.replace(matrix, lanes={**matrix.lanes, "embed": lane})
    assert select(pinned, lane_id="embed", profile=LINUX, bundle=bundle).engine == "onnx-cpu"
    cuda = msgspec.structs.replace(pinned, lanes={"embed": msgspec.structs.replace(lane, pin="cuda")})
    placement = select(cuda, lane_id="embed", profile=LINUX, bundle=bundle)
    assert placement.engine is None
    assert "llama-cpu: the lane is pinned to cuda" in placement.why_not()


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
    import msgspec

    lanes = {**matrix.lanes, "embed": msgspec.structs.replace(matrix.lanes["embed"], choose="fastest")}
    fastest = msgspec.structs.replace(matrix, lanes=lanes)
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


@pytest.mark.parametrize(
    ("floor", "words"),
    [
        (Floor("refused", "llama_missing"), "llama-cpp-python is not installed"),
        (Floor("refused", "cpu_unsupported"), "built for another CPU"),
        (Floor("failed", "probe_timeout", why="its probe did not answer within 15 s"), "did not answer"),
        (Floor("refused", "something_new"), "something_new"),
        (None, "was not probed"),
    ],
)
def test_an_engine_whose_own_probe_says_no_is_passed_over(
    matrix: HardwareMatrix, bundle: Bundle, floor: Floor | None, words: str
) -> None:
    floors = {key: value for key, value in LINUX.floors.items() if key != "llama:cpu"}
    profile = dataclasses.replace(LINUX, floors=floors if floor is None else {**floors, "llama:cpu": floor})
    placement = select(matrix, lane_id="embed", profile=profile, bundle=bundle)
    assert placement.engine == "onnx-cpu"
    assert words in {item.engine: item.reason for item in placement.considered}["llama-cpu"]


@pytest.mark.parametrize(
    ("hardware", "profile", "reason"),
    [
        (Hardware(id="h"), LINUX, None),
        (Hardware(id="h", arch=("arm64",)), LINUX, "hardware h: arch is x86_64, needs arm64"),
        (Hardware(id="h", os=("darwin", "windows")), LINUX, "hardware h: os is linux, needs darwin or windows"),
        (Hardware(id="h", min_os="14.4"), dataclasses.replace(MAC, os_version="14.4.0"), None),
        (Hardware(id="h", min_os="14.4"), dataclasses.replace(MAC, os_version="14.10"), None),
        (
            Hardware(id="h", min_os="14.4"),
            dataclasses.replace(MAC, os_version="14.3.9"),
            "hardware h: macOS is 14.3.9, needs 14.4",
        ),
        (Hardware(id="h", cpu_features=("avx2", "amx")), LINUX, "hardware h: cpu lacks amx"),
        (Hardware(id="h", neural_engine=True), LINUX, "hardware h: no Neural Engine"),
        (Hardware(id="h", neural_engine=False), MAC, "hardware h: a Neural Engine is present"),
        (Hardware(id="h", min_driver_api=13000), H200, None),
        (Hardware(id="h", min_driver_api=13010), H200, "hardware h: driver API is 13000, needs 13010"),
        (Hardware(id="h", min_compute_capability="7.5"), H200, None),
        (Hardware(id="h", min_compute_capability="9.0"), H200, None),
        (Hardware(id="h", min_compute_capability="10.0"), H200, "hardware h: compute capability is 9.0, needs 10.0"),
        (Hardware(id="h", min_compute_capability="7.5"), LINUX, "hardware h: no NVIDIA driver"),
        (Hardware(id="h", min_driver_api=1), BROKEN, "hardware h: its probe hung"),
        (Hardware(id="h", min_compute_capability="7.5"), NO_DEVICE, "hardware h: no device"),
        (Hardware(id="h", min_driver_api=1), UNASKED, "hardware h: a library is missing: cuda-python"),
        (Hardware(id="h", min_os="6.1"), dataclasses.replace(LINUX, os_version="6.1.0-rc12"), None),
        (
            Hardware(id="h", min_os="6.2"),
            dataclasses.replace(LINUX, os_version="odd"),
            "hardware h: Linux is odd, needs 6.2",
        ),
    ],
)
def test_hardware_conditions(hardware: Hardware, profile: HostProfile, reason: str | None) -> None:
    assert hardware_reason(hardware, profile) == reason


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
        ("onnx-cpu", LINUX, ["int8"], []),
        ("cuda", H200, ["int8", "f32"], ["f32"]),
        ("ane", MAC, ["f32"], []),
    ],
)
def test_dtype_preference(
    matrix: HardwareMatrix, engine: str, profile: HostProfile, have: list[str], order: list[str]
) -> None:
    assert dtype_order(matrix.engines[engine], profile, have) == order


def test_a_dtype_list_limits_what_is_taken(matrix: HardwareMatrix, bundle: Bundle) -> None:
    import msgspec

    engine = msgspec.structs.replace(matrix.engines["llama-cpu"], dtype=("q8_0",))
    limited = msgspec.structs.replace(matrix, engines={**matrix.engines, "llama-cpu": engine})
    placement = select(limited, lane_id="embed", profile=LINUX, bundle=bundle)
    assert placement.engine == "onnx-cpu"
    assert "bundle toy has gguf in f16, the engine takes q8_0" in placement.why_not()


def test_int8_is_taken_where_the_matrix_asks_for_it_and_on_a_cpu_only(matrix: HardwareMatrix, tmp_path: Path) -> None:
    import msgspec

    approximate = read(write_bundle(tmp_path / "m", formats={"safetensors-package": "int8"}))
    placement = select(matrix, lane_id="embed", profile=H200, bundle=approximate)
    assert placement.engine is None
    assert "has safetensors-package in int8, the engine takes int8 only where its dtype list" in placement.why_not()

    def listing(*dtypes: str) -> HardwareMatrix:
        engines = dict(matrix.engines)
        for name in ("onnx-cpu", "cuda"):
            engines[name] = msgspec.structs.replace(engines[name], dtype=dtypes)
        return msgspec.structs.replace(matrix, engines=engines)

    placement = select(listing("int8"), lane_id="embed", profile=H200, bundle=approximate)
    assert placement.engine == "onnx-cpu"
    assert placement.artifact is not None and placement.artifact.dtype == "int8"
    assert "the engine takes int8 (int8 on a CPU only)" in placement.why_not()
    assert dtype_order(listing("f32", "int8").engines["onnx-cpu"], LINUX, ["int8", "f32"]) == ["f32", "int8"]


def test_foreign_workers_are_not_probed(tmp_path: Path) -> None:
    from tests.support.small_bundle import write_matrix

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


def test_bf16_says_why_it_was_taken(matrix: HardwareMatrix, tmp_path: Path) -> None:
    bundle = read(write_bundle(tmp_path / "bf", formats={"gguf": "bf16"}))
    fast = select(matrix, lane_id="embed", profile=LINUX, bundle=bundle).considered[3].reason
    assert fast == "bundle toy has format gguf (bf16); cpu has avx512-bf16"
    assert select(matrix, lane_id="embed", profile=OLD_CPU, bundle=bundle).considered[3].reason.endswith("(bf16)")
    both = read(write_bundle(tmp_path / "f32", formats={"gguf": "f32"}))
    fast = select(matrix, lane_id="embed", profile=FP16_CPU, bundle=both).considered[3].reason
    assert fast == "bundle toy has format gguf (f32); fastest on a cpu with avx512-fp16"
