"""The blocking host's life: left, not left, closed under other threads' calls, copied by a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synapse_host import sync
from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest, UnknownModel
from synapse_host.host import Host
from synapse_host.sync import SyncHost
from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
OPEN = """
import gc, os, signal, sys, threading, time
from pathlib import Path
import synapse_host.sync
from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest
from synapse_host.sync import SyncHost
from synapse_host.text import tokenizer
matrix, toy, writer = map(Path, sys.argv[1:])
left = SyncHost.open(matrix, {"toy": toy, "writer": writer}, HostConfig(slice=4))
host = left.__enter__()
place = host._host.runtime.path
assert host.embed("toy", ["a"]).shape == (1, 8)
"""


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Path, Path]:
    return write_matrix(tmp_path), write_bundle(tmp_path / "toy", model_id="toy")


def program(toy: tuple[Path, Path], text: str) -> subprocess.CompletedProcess[str]:
    tmp = toy[0].parent / "tmp"
    tmp.mkdir()
    writer = write_bundle(toy[0].parent / "writer", task="generate", frame=False)
    done = subprocess.run(
        [sys.executable, "-c", OPEN + text, *map(str, toy), str(writer)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not list(tmp.iterdir()), "a runtime directory is left"
    return done


PROGRAMS: dict[str, tuple[str, str]] = {
    "a block that is never left": ("print('end')", "end\n"),
    "a thread that uses the host until it ends itself": (
        """
def late():
    threading.main_thread().join()
    print(host.embed("toy", ["a"]).shape)
threading.Thread(target=late).start()
""",
        "(1, 8)\n",
    ),
    "an iterator that the collector finds on the host's own thread": (
        """
gc.disable()
stream = host.generate_stream("writer", "a", max_tokens=12)
next(stream)
ring = [stream]
ring.append(ring)
del stream, ring
host._thread._loop.call_soon_threadsafe(gc.collect)
print(host.embed("toy", ["a"]).shape)
""",
        "(1, 8)\n",
    ),
    "a host that the collector finds on its own thread": (
        """
gc.disable()
thread, loop = host._thread._thread, host._thread._loop
ring = [left]
ring.append(ring)
del left, ring
loop.call_soon_threadsafe(gc.collect)
thread.join(30)
print(thread.is_alive())
""",
        "False\n",
    ),
    "an interrupt while the tokenizer is opened": (
        """
reading, go = threading.Event(), threading.Event()
real = tokenizer.TextTokenizer.__init__
def slow(self, *args, **options):
    reading.set()
    go.wait()
    real(self, *args, **options)
tokenizer.TextTokenizer.__init__ = slow
def interrupt():
    reading.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    host.generate("writer", "a")
except KeyboardInterrupt:
    print("interrupted")
go.set()
print(host.embed("toy", ["a"]).shape)
""",
        "interrupted\n(1, 8)\n",
    ),
    "closing under a call that waits for a thread": (
        """
reading = threading.Event()
def stuck(*args, **options):
    reading.set()
    time.sleep(600)
tokenizer.TextTokenizer.__init__ = stuck
def call():
    try:
        host.generate("writer", "a")
    except InvalidRequest as exc:
        print(type(exc).__name__, flush=True)
synapse_host.sync.LEAVE_S = 0.1
caller = threading.Thread(target=call)
caller.start()
reading.wait()
left.__exit__(None, None, None)
caller.join(30)
print(caller.is_alive())
""",
        "InvalidRequest\nFalse\n",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_it_should_whatever_it_leaves(name: str, toy: tuple[Path, Path]) -> None:
    if "interrupt" in name and os.name == "nt":
        pytest.skip("no SIGINT to oneself")
    text, said = PROGRAMS[name]
    done = program(toy, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_harms_nothing_and_waits_for_nothing(toy: tuple[Path, Path]) -> None:
    done = program(
        toy,
        "import warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # 3.12 and later warn of a fork beside threads\n"
        "if (pid := os.fork()) == 0:\n"
        "    try:\n"
        "        host.embed('toy', ['a'])\n"
        "    except InvalidRequest as exc:\n"
        "        print(exc, flush=True)\n"
        "    left.__exit__(None, None, None)\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), place.exists())\n"
        "print(host.embed('toy', ['a']).shape, host.health()['lanes']['embed']['generation'])\n",
    )
    said, *rest = done.stdout.splitlines()
    assert said.startswith("this host belongs to process ") and done.stderr == ""
    assert (done.returncode, rest) == (0, ["7 True", "(1, 8) 1"])


def test_closing_answers_the_calls_of_other_threads(tmp_path: Path) -> None:
    script = {"rules": [{"on": "EMBED_BATCH", "first_id": 99, "do": [{"sleep": 30}]}]}
    matrix, model = write_matrix(tmp_path, script), write_bundle(tmp_path / "toy", model_id="toy")
    ends: list[Any] = []

    def call() -> None:
        try:
            ends.append(host.embed_ids("toy", [[99]]))
        except Exception as exc:
            ends.append(exc)

    with SyncHost.open(matrix, {"toy": model}) as host:
        threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        while host.health()["lanes"]["embed"]["state"] != "serving":
            time.sleep(0.01)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ends) == 4 and all(getattr(end, "code", None) is not None for end in ends), ends


@pytest.mark.parametrize("installed", [True, False])
def test_uvloop_is_taken_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = asyncio.new_event_loop()
    monkeypatch.setattr(sync, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(new_event_loop=lambda: made))
    loop = sync.new_event_loop()
    assert (loop is made) is installed
    loop.close()
    made.close()


def test_the_same_calls_until_it_is_closed(toy: tuple[Path, Path]) -> None:
    matrix, model = toy
    writer = write_bundle(matrix.parent / "writer", task="generate", frame=False)
    with SyncHost.open(matrix, {"toy": model, "writer": writer}, HostConfig(slice=2)) as host:
        host.load("toy")
        assert host.embed("toy", ["a"]).shape == (1, 8)
        assert host.lane_of("toy").lane_id == host.explain("embed")[0]["lane"] == "embed"
        assert host.health()["lanes"]["embed"]["worker_pid"] is not None
        assert [piece.n_gen for piece in host.generate_stream("writer", "a", max_tokens=4)] == [2, 4]
        first = host.generate_stream("writer", "a", max_tokens=4)
        next(first)
        first.close()
        left = host.generate_stream("writer", "a", max_tokens=4)
        next(left)
        with pytest.raises(UnknownModel):
            host.embed("other", ["a"])

        async def inside(_: Host) -> str:
            with pytest.raises(InvalidRequest) as refused:
                host.embed("toy", ["a"])
            return refused.value.message

        assert "own thread" in host.call(inside)
    left.close()
    calls: list[Any] = [lambda: host.embed("toy", ["a"]), host.health, lambda: host.load("toy")]
    for call in calls:
        with pytest.raises(InvalidRequest, match="this host is closed"):
            call()


def test_every_call_of_the_host_with_the_same_arguments() -> None:
    calls = {name for name, value in vars(Host).items() if callable(value) and not name.startswith("_")}
    for name in calls - {"aclose", "on_loop"}:  # its block closes it, and its loop is its own business
        ours, theirs = inspect.signature(getattr(SyncHost, name)), inspect.signature(getattr(Host, name))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
    opened, theirs = inspect.signature(SyncHost.open), inspect.signature(Host.open)
    assert [*opened.parameters] == [name for name in theirs.parameters if name != "qualifying"]
