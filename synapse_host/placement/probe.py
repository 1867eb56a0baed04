"""An engine's hardware floor, asked of the engine itself in a throw-away child with a time limit.

A driver that crashes or hangs hurts only the child; whatever it does becomes a :class:`Floor`, never an exception.
Answers are cached per boot, operating system build, driver and everything that is installed; crashes, hangs and rubbish
are not, and a refusal only for an hour, so that what no key sees (a library of the system) is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from synapse_host.errors import BackendMissing
from synapse_host.placement import interpreter

TIME_LIMIT: Final = 15.0
SLOW_DEVICES: Final = {"metal": 120.0}
"""Devices whose first probe takes longer, in seconds: llama.cpp compiles its Metal kernels when it registers one."""
VERSION_LIMIT_S: Final = 10.0
OUTPUT_LIMIT: Final = 64 * 1024
REFUSAL_TTL: Final = 3600.0

Status: TypeAlias = Literal["ok", "refused", "failed"]

DISTRIBUTIONS: Final = {
    "llama": ("llama-cpp-python",),
    "cuda": ("onnxruntime-gpu", "onnxruntime", "onnx", "cuda-python"),
    "ane": ("coremltools", "pyobjc-framework-CoreML"),
}
"""The packages that each engine needs; another version may give another answer."""


class Floor(Struct, frozen=True):
    """What an engine's ``--probe-floor`` prints: ``ok`` or ``refused``.

    ``failed`` is ours alone: the probe itself went wrong; ``why`` then says how, for people.
    """

    status: Status
    code: str
    required: dict[str, Any] = {}
    observed: dict[str, Any] | None = None
    why: str = ""


def worker_command(engine: str) -> tuple[str, ...]:
    """Return the command of our own worker for ``llama``, ``cuda`` or ``ane``; BackendMissing without a Python."""
    return interpreter.module(f"engines.{engine}")


def probe(
    command: tuple[str, ...],
    *,
    cwd: Path | None = None,
    limit: float = TIME_LIMIT,
    env: Mapping[str, str] | None = None,
) -> Floor:
    """Run ``<command> --probe-floor`` and return what came of it within *limit* seconds.

    The child gets a worker's reduced environment, with *env* from the matrix: another one could be another answer.
    """
    from synapse_host.placement.child import signal_name

    try:
        answer = _ask(command, name="probe", cwd=cwd, limit=limit, env=env or {})
    except OSError as exc:
        return Floor("failed", "probe_not_started", why=f"can't start {command[0]}: {exc.strerror or exc}")
    tail = answer.err.decode(errors="replace").strip().splitlines()
    last = f": {tail[-1][:200]}" if tail else ""
    if answer.flooded:
        return Floor("failed", "probe_rubbish", why=f"its probe printed more than {OUTPUT_LIMIT} bytes")
    if answer.late:
        return Floor("failed", "probe_timeout", why=f"its probe did not answer within {limit:g} s")
    if answer.code is not None and answer.code < 0:
        return Floor("failed", "probe_crashed", why=f"its probe was killed by {signal_name(answer.code)}{last}")
    return _parse(answer.out, answer.code, last)


def version_line(
    command: tuple[str, ...], *, cwd: Path | None, env: Mapping[str, str], limit: float = VERSION_LIMIT_S
) -> str:
    """Return the one line that ``<command> --version`` prints, empty where it doesn't tell."""
    try:
        answer = _ask(command, name="version", cwd=cwd, limit=limit, env=env)
    except OSError:
        return ""
    lines = answer.out[:4096].decode(errors="replace").splitlines()
    well = answer.code in (0, None) and not answer.late and not answer.flooded
    return lines[0] if well and len(lines) == 1 else ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a child left. ``code``: None where somebody else took it, or where it was ``late``: still running."""

    code: int | None
    late: bool
    out: bytes
    err: bytes
    flooded: bool


def _ask(command: tuple[str, ...], *, name: str, cwd: Path | None, limit: float, env: Mapping[str, str]) -> _Answer:
    """Run a child in a session of its own and leave nothing of it behind. Raises OSError where it can't start."""
    from synapse_host.placement.child import reap, worker_environment

    child = subprocess.Popen(  # noqa: S603 - our own worker module, or the command the matrix names
        command,
        cwd=cwd,
        env=worker_environment(name, env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=os.name == "posix",
    )
    assert child.stdout is not None and child.stderr is not None
    outputs = [bytearray(), bytearray()]
    flooded = threading.Event()

    def drain(stream: Any, into: bytearray) -> None:
        while data := stream.read1(8192):
            if len(into) + len(data) > OUTPUT_LIMIT:
                flooded.set()
                _kill(child)
                return
            into += data

    threads = [
        threading.Thread(target=drain, args=pair, daemon=True)
        for pair in zip((child.stdout, child.stderr), outputs, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as exc:
        _kill(child)
        reap(child)
        child.stdout.close()
        child.stderr.close()
        raise OSError(errno.EAGAIN, "no thread can be started") from exc
    code, late = None, False
    try:
        code = reap(child, limit)
    except subprocess.TimeoutExpired:
        late = True
        _kill(child)
        reap(child)
    # A grandchild may hold the pipes open: it leads no session of its own, so it dies with the group.
    _kill(child)
    for thread in threads:
        thread.join(1.0)
    child.stdout.close()
    child.stderr.close()
    return _Answer(code, late, bytes(outputs[0]), bytes(outputs[1]), flooded.is_set())


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


def _parse(output: bytes, code: int | None, last: str) -> Floor:
    """Read a probe's line; its exit status has to agree with it, where it is known."""
    try:
        answer = msgspec.json.decode(output, type=Floor)
    except msgspec.MsgspecError:
        answer = None
    if answer is None or answer.status == "failed" or len(output.splitlines()) != 1:
        if code not in (0, 2):
            how = "an unknown status" if code is None else f"status {code}"
            return Floor("failed", "probe_crashed", why=f"its probe ended with {how}{last}")
        return Floor("failed", "probe_rubbish", why="its probe did not print one line of the agreed JSON")
    if code is not None and (answer.status == "ok") != (code == 0):
        return Floor("failed", "probe_rubbish", why=f"its probe said {answer.status} and ended with status {code}")
    return answer


def ask(
    keys: set[tuple[str, str]], *, cache: FloorCache | None, fresh: bool = False, limit: float | None = None
) -> dict[str, Floor]:
    """Return the floors of our own workers by ``engine:device``; blocks until the slowest answers or its time is over.

    *limit*: seconds that none of them may take longer than, also where its device has more.
    *fresh* asks anew and refreshes the cache.
    """
    known = {key: floor for key in keys if (floor := cache.get(*key))} if cache and not fresh else {}
    missing = sorted(keys - known.keys())
    if missing:
        cwd = interpreter.package_root()

        def one(key: tuple[str, str]) -> Floor:
            engine, device = key
            try:
                command = (*worker_command(engine), "--probe-floor", "--device", device)
            except BackendMissing as exc:
                return Floor("failed", "probe_not_started", why=exc.message)
            longest = min(SLOW_DEVICES.get(device, TIME_LIMIT), limit or math.inf)
            return probe(command, cwd=cwd, limit=longest, env=interpreter.search_path())

        with ThreadPoolExecutor(len(missing)) as pool:
            found = dict(zip(missing, pool.map(one, missing), strict=True))
        if cache:
            for key, floor in found.items():
                cache.put(*key, floor)
        known |= found
    return {f"{engine}:{device}": floor for (engine, device), floor in known.items()}


def installed(engine: str) -> dict[str, str]:
    """Return the installed versions of the packages an engine needs."""
    return versions(DISTRIBUTIONS.get(engine, ()))


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cuda_wheels() -> dict[str, str]:
    """Return the versions of NVIDIA's wheels (CUDA runtime, cuBLAS, cuDNN and so on) that are installed."""
    from importlib.metadata import distributions

    found = {}
    for one in distributions():
        name = str(one.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-"):
            found[name] = one.version
    return dict(sorted(found.items()))


class FloorCache:
    """Answers on disk, in the user's cache directory. *machine* names boot and build.

    An answer is good for the surroundings it was given in: the machine, the Python, every installed package (also one
    that was installed again in the same version, as doctor's fixes do), and the variables that a probe sees.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self._directory = directory
        python = [sys.executable, os.environ.get(interpreter.VARIABLE)]
        self._surroundings = [machine, *python, *_packages(), *_variables()]

    def _file(self, engine: str, device: str) -> Path:
        key = hashlib.sha256(json.dumps([*self._surroundings, engine, device]).encode()).hexdigest()[:32]
        return self._directory / f"floor-{engine}-{device}-{key}.json"

    def get(self, engine: str, device: str) -> Floor | None:
        """Return a cached answer that is still good."""
        file = self._file(engine, device)
        try:
            age = time.time() - file.stat().st_mtime
            floor = msgspec.json.decode(file.read_bytes(), type=Floor)
        except (OSError, msgspec.MsgspecError):
            return None
        return floor if floor.status == "ok" or 0 <= age < REFUSAL_TTL else None

    def put(self, engine: str, device: str, floor: Floor) -> None:
        """Remember an answer; a full or read-only disk is no reason to fail."""
        file = self._file(engine, device)
        with suppress(OSError):
            if floor.status == "failed":
                file.unlink(missing_ok=True)
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
            part.write_bytes(msgspec.json.encode(floor))
            part.replace(file)


def _packages() -> list[str]:
    """Return the installed distributions of this Python: folder, name with version, and when it was installed."""
    found = []
    for folder in dict.fromkeys([str(interpreter.package_root()), *sys.path]):
        try:
            with os.scandir(folder or ".") as entries:
                named = [entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info", ".pth"))]
            found += [f"{folder}/{entry.name} {entry.stat().st_mtime_ns}" for entry in named]
        except OSError:
            continue  # a zip archive, or a folder that isn't there
    return sorted(found)


def _variables() -> list[str]:
    """Return the variables that decide which libraries and devices a probe finds."""
    from synapse_host.placement.child import ENVIRONMENT_PREFIXES, worker_environment

    telling = ("LD_LIBRARY_PATH", *(prefix for prefix in ENVIRONMENT_PREFIXES if prefix != "LC_"))
    return sorted(f"{name}={value}" for name, value in worker_environment("", {}).items() if name.startswith(telling))
