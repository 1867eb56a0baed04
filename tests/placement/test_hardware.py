from __future__ import annotations

from pathlib import Path

import pytest

from engines import machine
from synapse_host.placement import hardware

PERIOD = {f"{controller}/x/cpu.cfs_period_us": "100000" for controller in ("cpu", "cpu,cpuacct")}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "max 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "rubbish"}, None),
        ("0::/\n", {}, None),
        ("3:cpu,cpuacct:/x\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000", **PERIOD}, 3.0),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", **PERIOD}, None),
        ("3:memory:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000", **PERIOD}, None),
    ],
)
def test_the_quota_is_the_smallest_on_the_way_up(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert machine.cpu_quota(root=tmp_path / "fs", membership=tmp_path / "cgroup") == expected


def test_cores_are_rounded_down_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, affinity, cores in ((0.5, 4, 1), (2.9, 4, 2), (None, 3, 3), (8.0, 2, 2)):
        monkeypatch.setattr(machine, "cpu_quota", lambda limit=limit, **_: limit)
        monkeypatch.setattr(machine, "affinity", lambda affinity=affinity: affinity)
        assert hardware.detect().cores == cores


def test_this_machine() -> None:
    profile = hardware.detect()
    assert profile.os in ("linux", "darwin", "windows") and profile.arch in ("x86_64", "arm64")
    assert profile.cores >= 1 and profile.ram_total > profile.ram_free > 0
    assert profile.os_build and profile.os in profile.summary()
    assert profile.os_build in hardware.machine_id()


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (x@y)", "580.159.03"),
        ("something else", None),
    ],
)
def test_the_nvidia_driver_and_models_are_read_from_its_files(tmp_path: Path, line: str, driver: str | None) -> None:
    assert hardware.nvidia(tmp_path) == (None, ())
    (tmp_path / "version").write_text(line + "\nGCC version: 12.2.0\n")
    for slot, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA H200"), ("0000:03:00.0", "Tesla T4")):
        folder = tmp_path / "gpus" / slot
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\nGPU UUID: \t GPU-1234\n")
    assert hardware.nvidia(tmp_path) == (driver, ("NVIDIA H200", "Tesla T4"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: Intel(R) Xeon(R)\n", "Intel(R) Xeon(R)"),
        (
            "processor : 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n",
            "CPU implementer 0x41, CPU part 0xd40, CPU variant 0x1",
        ),
        ("", ""),
    ],
)
def test_a_processor_has_a_name_on_arm_too(text: str, name: str) -> None:
    assert hardware.cpu_name(text) == name
