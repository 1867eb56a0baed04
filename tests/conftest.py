"""What every test gets: leak checks around it, hardware options, a clock that stands still.

Leaks: descriptors, Python threads, child processes and socket files that a test leaves behind make it fail. A test that
has to leave something says so with ``@pytest.mark.leaks_allowed("threads", ...)``.

Hardware: tests marked ``ane``, ``cuda``, ``mac-cpu`` or ``metal`` skip with the reason where the device is missing.
``--hw=cuda`` (and so on) turns every such skip into a failure, and a run that executed none of them fails too: a
hardware job can't pass by skipping.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import Bundle
from synapse_host.errors import BundleInvalid, UnknownModel
from synapse_host.models import catalogue
from synapse_host.worker.listener import RuntimeDirectory
from tests.support.clock import ManualClock
from tests.support.lanes import make, pytest_pyfunc_call  # noqa: F401 - the fixture and the hook are found by name

HARDWARE = {"ane": "ane", "cuda": "cuda", "mac-cpu": "ane", "metal": "llama"}
"""Hardware marker -> the engine module whose ``--probe-floor`` decides."""
WITHOUT = {"mac-cpu": "no_neural_engine"}
"""Hardware marker -> the refusal of that probe that is no lack: these tests leave the Neural Engine alone."""
OPT_IN = {"bench": "bench", "ray": "ray", "soak": "soak"}
"""Marker -> the word in ``-m`` or in a file's name that asks for it."""
SETTLE_S = 3.0
PROBE_S = 150.0
IGNORED_TARGETS = ("/dev/", "/proc/", "/sys/", "anon_inode:[perf")


# --- leaks -----------------------------------------------------------------------------------------------------------


def descriptors() -> dict[int, str]:
    """Return the open descriptors of this process and what they refer to (empty where there is no /proc)."""
    result = {}
    try:
        names = os.listdir("/proc/self/fd")  # noqa: PTH208 - around every test: no Path objects
    except OSError:
        return {}
    for name in names:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the listing's own descriptor
        if not target.startswith(IGNORED_TARGETS):
            result[int(name)] = target
    return result


def children() -> set[int]:
    """Return the pids of our direct children, zombies included."""
    pids: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208
            with open(f"/proc/self/task/{task}/children") as file:  # noqa: PTH123
                pids.update(map(int, file.read().split()))
    except OSError:
        import psutil

        pids.update(child.pid for child in psutil.Process().children())
    return pids


def leaked(before: tuple[dict[int, str], set[threading.Thread], set[int]]) -> dict[str, Any]:
    """Return what exists now and did not *before*, by kind."""
    fds, threads, pids = before
    found: dict[str, Any] = {
        "descriptors": {fd: target for fd, target in descriptors().items() if fds.get(fd) != target},
        "threads": [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()],
        "children": sorted(children() - pids),
    }
    return {kind: value for kind, value in found.items() if value}


if importlib.util.find_spec("uvloop") is not None:
    import uvloop

    # libuv opens one pair of pipes for the whole process with its first loop: no test's leak.
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads or children behind. What is ending gets a moment to end."""
    marker = request.node.get_closest_marker("leaks_allowed")
    allowed = set(marker.args) if marker else set()
    before = (descriptors(), set(threading.enumerate()), children())
    yield
    deadline = time.monotonic() + SETTLE_S
    collected = False
    while found := {kind: value for kind, value in leaked(before).items() if kind not in allowed}:
        if not collected:
            collected = True
            gc.collect()
        elif time.monotonic() > deadline:
            pytest.fail(f"leaked: {found}")
        else:
            time.sleep(0.01)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Yield a private directory with a short path (socket paths are limited to 104 bytes); no socket may stay in it."""
    path = Path(tempfile.mkdtemp(prefix="syn-"))
    try:
        yield path
        left = [str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_socket()]
    finally:
        shutil.rmtree(path, ignore_errors=True)
    assert not left, f"socket files left: {left}"


@pytest.fixture
def directory(runtime_dir: Path) -> Iterator[RuntimeDirectory]:
    """Yield the runtime directory of a host."""
    made = RuntimeDirectory.open(runtime_dir)
    yield made
    made.close()


@pytest.fixture(scope="session")
def default_bundle() -> Callable[[str], Bundle]:
    """Return what gets a default model's bundle as this release makes it; it skips where it can't be had."""

    def get(name: str) -> Bundle:
        try:
            return catalogue.install(name)
        except (UnknownModel, BundleInvalid, OSError) as exc:
            pytest.skip(f"{name} can't be had here: {exc}")

    return get


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that moves only when told."""
    return ManualClock()


# --- hardware --------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hw",
        action="append",
        default=[],
        choices=sorted(HARDWARE),
        help="this run is for that device: its tests must run, a skip is a failure",
    )


def _heed_signals() -> None:
    """Undo what nohup or a shell's ``&`` ignores: every process that a test starts would ignore it as well."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    _heed_signals()
    config.addinivalue_line("markers", "leaks_allowed(*kinds): this test may leave descriptors, threads, children")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave measurements and long runs to those who ask: by ``-m``, or by naming a file."""
    asked = str(config.option.markexpr) + " ".join(arg for arg in config.args if "::" in arg or arg.endswith(".py"))
    unasked = [name for name, hint in OPT_IN.items() if hint not in asked]
    chosen, rest = [], []
    for item in items:
        (rest if any(item.get_closest_marker(name) for name in unasked) else chosen).append(item)
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the run: the leak check collects after many tests, 0.1 s each."""
    gc.freeze()


@functools.cache
def missing_device(marker: str) -> str | None:
    """Return why the device of *marker* can't be used, None when it can; asks the engine in a throw-away child."""
    engine = HARDWARE[marker]
    device = engine if marker in WITHOUT else marker
    command = [sys.executable, "-m", f"engines.{engine}", "--probe-floor", "--device", device]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no {marker}: the probe took more than {PROBE_S:g} s"
    if probe.returncode == 0:
        # llama.cpp built for the processor alone is a sound llama.cpp; its probe says so, and what it was built for.
        built = (json.loads(probe.stdout)["observed"] or {}).get("compiled_backend", marker)
        return None if built == marker else f"no {marker} here: llama-cpp-python was built for {built}"
    if marker in WITHOUT and f'"{WITHOUT[marker]}"' in probe.stdout:
        return None
    lines = probe.stdout.strip().splitlines() or probe.stderr.strip().splitlines() or ["no output"]
    return f"no {marker} here: probe exit {probe.returncode}, {lines[-1][:300]}"


def missing(item: pytest.Item) -> tuple[str, str] | None:
    """Return (marker, why) of what *item* needs and this machine lacks."""
    for marker in HARDWARE:
        if item.get_closest_marker(marker) and (reason := missing_device(marker)):
            return marker, reason
    if item.get_closest_marker("windows") and os.name != "nt":
        return "windows", "needs Windows; not measured here"
    if item.get_closest_marker("llama") and importlib.util.find_spec("llama_cpp") is None:
        return "llama", "needs the extra 'llama' (llama-cpp-python)"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    lack = missing(item)
    if lack is not None:
        pytest.skip(lack[1])


def _demanded(item: pytest.Item) -> list[str]:
    return [marker for marker in item.config.getoption("--hw") if item.get_closest_marker(marker)]


_executed = pytest.StashKey[set[str]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    demanded = _demanded(item)
    if not demanded:
        return
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        report.longrepr = f"--hw={demanded[0]} allows no skip: {reason.removeprefix('Skipped: ')}"
    elif report.when == "call":
        item.config.stash.setdefault(_executed, set()).update(demanded)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    demanded = set(session.config.getoption("--hw"))
    idle = demanded - session.config.stash.get(_executed, set())
    if idle and not session.config.getoption("collectonly"):
        print(f"\n--hw: no test of {', '.join(sorted(idle))} was executed", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
