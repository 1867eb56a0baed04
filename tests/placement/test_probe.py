from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from synapse_host.placement import probe
from synapse_host.placement.probe import Floor, FloorCache
from tests.support.lanes import alive

GOOD = '{"status": "ok", "code": "ok", "required": {}, "observed": {"driver_api": 13000}}'

REFUSED = '{"status": "refused", "code": "cuda_no_driver", "required": {}, "observed": null}'


def script(tmp_path: Path, body: str) -> tuple[str, ...]:
    path = tmp_path / "probe.py"
    path.write_text("import os, sys, time\n" + body)
    return (sys.executable, str(path), "--probe-floor")


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (f"print('{GOOD}')", "ok", "ok", ""),
        (f"print('{REFUSED}'); sys.exit(2)", "refused", "cuda_no_driver", ""),
        ("os.kill(os.getpid(), 4)", "failed", "probe_crashed", "SIGILL"),
        ("print('boom', file=sys.stderr, flush=True); os.abort()", "failed", "probe_crashed", "SIGABRT: boom"),
        ("raise SystemExit('no such module')", "failed", "probe_crashed", "status 1: no such module"),
        ("print('hello')", "failed", "probe_rubbish", "one line of the agreed JSON"),
        (f"print('{GOOD}'); print('more')", "failed", "probe_rubbish", "one line"),
        ("print('[]')", "failed", "probe_rubbish", "one line"),
        ('print(\'{"status": "fine", "code": 1}\')', "failed", "probe_rubbish", "one line"),
        (f"print('{GOOD}'); sys.exit(2)", "failed", "probe_rubbish", "said ok and ended with status 2"),
        ("while True: sys.stdout.write('x' * 65536)", "failed", "probe_rubbish", "more than"),
        ("", "failed", "probe_rubbish", "one line"),
    ],
)
def test_whatever_the_child_does_becomes_a_floor(tmp_path: Path, body: str, status: str, code: str, words: str) -> None:
    answer = probe.probe(script(tmp_path, body), limit=30)
    assert (answer.status, answer.code) == (status, code)
    assert words in answer.why


@pytest.mark.process
@pytest.mark.parametrize("question", ["floor", "version"])
def test_a_hanging_child_is_killed_with_its_own_children(question: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    body += f"open({str(pid_file)!r}, 'w').write(str(child.pid))\ntime.sleep(60)"
    started = time.monotonic()
    if question == "floor":
        answer = probe.probe(script(tmp_path, body), limit=1.5)
        assert (answer.status, answer.code) == ("failed", "probe_timeout")
    else:
        assert probe.version_line(script(tmp_path, body), cwd=None, env={}, limit=1.5) == ""
    assert time.monotonic() - started < 30
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


@pytest.mark.process
def test_a_grandchild_that_keeps_stdout_does_not_delay_the_answer(tmp_path: Path) -> None:
    body = (
        f"import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint('{GOOD}')"
    )
    started = time.monotonic()
    assert probe.probe(script(tmp_path, body), limit=30).status == "ok"
    assert time.monotonic() - started < 25


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("print('synapse-worker-x 1')", "synapse-worker-x 1"),
        ("print('a'); print('b')", ""),
        ("print('a'); sys.exit(1)", ""),
        ("os.abort()", ""),
        ("while True: sys.stdout.write('x' * 65536)", ""),
    ],
)
def test_a_version_is_one_line_or_nothing(body: str, line: str, tmp_path: Path) -> None:
    assert probe.version_line(script(tmp_path, body), cwd=None, env={}, limit=30) == line


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    assert probe.version_line((str(tmp_path / "nothing"),), cwd=None, env={}) == ""
    answer = probe.probe((str(tmp_path / "nothing"),))
    assert (answer.status, answer.code) == ("failed", "probe_not_started")


def test_the_cache_keeps_ok_and_for_a_while_refusals_but_no_failures(tmp_path: Path) -> None:
    cache = FloorCache(tmp_path / "c", "boot 1")
    assert cache.get("llama", "cpu") is None
    good = Floor("ok", "ok", {"a": 1}, {"b": 2})
    cache.put("llama", "cpu", good)
    assert cache.get("llama", "cpu") == good
    assert FloorCache(tmp_path / "c", "boot 2").get("llama", "cpu") is None
    refused = Floor("refused", "llama_missing")
    cache.put("llama", "cpu", refused)
    assert cache.get("llama", "cpu") == refused
    (file,) = (tmp_path / "c").iterdir()
    old = time.time() - probe.REFUSAL_TTL - 1
    os.utime(file, (old, old))
    assert cache.get("llama", "cpu") is None
    cache.put("llama", "cpu", Floor("failed", "probe_timeout", why="x"))
    assert list((tmp_path / "c").iterdir()) == []


def test_a_refusal_is_forgotten_once_something_is_installed_or_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What doctor's fixes do: NVIDIA's wheels beside onnxruntime; the same version built again; a library's folder."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    refused = Floor("refused", "cuda_runtime_missing")

    def kept() -> bool:
        return FloorCache(tmp_path / "c", "boot").get("cuda", "cuda") == refused

    wheel = site / "nvidia_cublas-13.0.dist-info"
    changes: dict[str, Callable[[], object]] = {
        "install": wheel.mkdir,
        "install again": lambda: os.utime(wheel, (1, 1)),
        "set the library path": lambda: monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64"),
        "set Python": lambda: monkeypatch.setenv("SYNAPSE_PYTHON", sys.executable),
    }
    for name, change in changes.items():
        FloorCache(tmp_path / "c", "boot").put("cuda", "cuda", refused)
        monkeypatch.setenv("EDITOR", name)  # what no probe sees changes nothing
        assert kept()
        change()
        assert not kept(), name


def test_a_broken_cache_is_no_cache(tmp_path: Path) -> None:
    cache = FloorCache(tmp_path, "boot")
    cache.put("llama", "cpu", Floor("ok", "ok"))
    (file,) = tmp_path.iterdir()
    for text in ("", "{", "[]", '{"x": 1}'):
        file.write_text(text)
        assert cache.get("llama", "cpu") is None
    unwritable = FloorCache(Path("/proc/nowhere"), "boot")
    unwritable.put("llama", "cpu", Floor("ok", "ok"))
    assert unwritable.get("llama", "cpu") is None


@pytest.mark.process
def test_asking_uses_the_cache_until_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    command = script(tmp_path, f"open({str(log)!r}, 'a').write('x')\nprint('{GOOD}')")[:2]
    monkeypatch.setattr(probe, "worker_command", lambda engine: command)
    cache = FloorCache(tmp_path / "c", "boot")
    for fresh, asked in ((False, 1), (False, 1), (True, 2)):
        answers = probe.ask({("cuda", "cuda")}, cache=cache, fresh=fresh)
        assert answers["cuda:cuda"].observed == {"driver_api": 13000}
        assert len(log.read_text()) == asked


def test_a_device_that_compiles_its_kernels_first_gets_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = script(tmp_path, f"import time\ntime.sleep(1.5)\nprint('{GOOD}')")[:2]
    monkeypatch.setattr(probe, "worker_command", lambda engine: command)
    monkeypatch.setattr(probe, "TIME_LIMIT", 0.5)
    monkeypatch.setattr(probe, "SLOW_DEVICES", {"metal": 30.0})
    answers = probe.ask({("llama", "metal"), ("llama", "cpu")}, cache=None)
    assert {key: floor.status for key, floor in answers.items()} == {"llama:metal": "ok", "llama:cpu": "failed"}
    hurried = probe.ask({("llama", "metal")}, cache=None, limit=0.5)
    assert hurried["llama:metal"].code == "probe_timeout", "a caller's own limit counts for every device"
