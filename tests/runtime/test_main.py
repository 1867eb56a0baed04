"""The command line, as processes: what is on stdout, which status, what is imported before HELLO."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from engines.runtime import main as runtime_main
from engines.runtime.engine import EngineIdentity
from tests.support.peer import IDS, WorkerProcess, embed, ready
from tests.support.scripted import command

pytestmark = pytest.mark.process
ENGINES = ["llama", "cuda", "ane"]
HEAVY = {"numpy", "llama_cpp", "onnxruntime", "onnx", "coremltools", "cuda", "objc", "CoreML", "tokenizers", "psutil"}


def run(*arguments: str, program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [*(program or command()), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def test_version_is_one_line_that_starts_with_program_and_distribution() -> None:
    result = run("--version", program=command({"version": "scripted-9", "build_flags": {"backend": "none"}}))
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        f"scripted-worker {version('synapse-workers')} protocol=3 engine=llama.cpp-worker engine_version=scripted-9 "
        "backend=none device=cpu"
    ]


def test_probe_floor_is_one_json_line() -> None:
    result = run("--probe-floor")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]) == {"status": "ok", "code": "ok", "required": {}, "observed": {}}


def test_a_refused_probe_exits_2() -> None:
    program = """
        import sys
        from engines.runtime.engine import Engine, EngineIdentity, Probe
        from engines.runtime.main import run

        class Refusing(Engine):
            name, serves, ref_prefix = "x", frozenset(), "x"
            def identity(self): return EngineIdentity("x", "1")
            def load(self, request, *, progress): raise NotImplementedError
            def probe_floor(self):
                print("a library that talks")
                import os; os.write(1, b"even natively\\n")
                return Probe("refused", "cuda_no_driver", {"driver_api": 13000}, None)

        sys.exit(run(lambda options: Refusing(), program="refusing"))
        """
    result = run("--probe-floor", program=[sys.executable, "-c", textwrap.dedent(program)])
    assert result.returncode == 2
    assert json.loads(result.stdout) == {
        "status": "refused",
        "code": "cuda_no_driver",
        "required": {"driver_api": 13000},
        "observed": None,
    }
    assert "even natively" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--socket", "/tmp/x.sock"],
        ["--nonce", "0123456789abcdef"],
        ["--socket", "/tmp/x", "--nonce", "0123456789ABCDEF"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcde"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcdeg"],
        ["--socket", "/tmp/x", "--pipe", "y", "--nonce", "0123456789abcdef"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcdef", "--device", "tpu"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcdef", "--device", "cpu:1"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcdef", "--packed", "a"],
        ["--socket", "/tmp/x", "--nonce", "0123456789abcdef", "--packed", "256,0"],
        ["--version", "--probe-floor"],
        ["--unknown"],
        ["--vers"],
    ],
)
def test_wrong_usage_exits_2_and_says_why_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_help_goes_to_stderr() -> None:
    result = run("--help")
    assert (result.returncode, result.stdout) == (0, "")
    assert "--probe-floor" in result.stderr


@pytest.mark.parametrize("arguments", [["--socket", "/nonexistent/x.sock"], ["--pipe", r"\\.\pipe\none"]])
def test_no_host_to_connect_to_is_one_line_and_status_1(arguments: list[str]) -> None:
    result = run(*arguments, "--nonce", "0123456789abcdef")
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1


def test_a_name_in_identity_that_is_not_the_engines_is_a_bug() -> None:
    from tests.support.toy_engine import ToyEngine

    toy = ToyEngine()
    toy.identity = lambda: EngineIdentity("other", "1")  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        runtime_main.identify(toy, runtime_main.WorkerOptions())


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "metal", "ane"])
def test_the_device_is_echoed(runtime_dir: Path, device: str) -> None:
    with WorkerProcess(command(), runtime_dir, device=device) as worker:
        hello = worker.end.shake_hands()
        assert hello.engine.build_flags == {"device": device}
        assert worker.stop() == 0


@pytest.mark.parametrize(("flag", "widths"), [([], None), (["--packed", "256,384"], [256, 384])])
def test_packed_widths_reach_hello(runtime_dir: Path, flag: list[str], widths: list[int] | None) -> None:
    script = {"engine": "ane-coreml-worker", "packed": True if flag else None}
    with WorkerProcess(command(script), runtime_dir, extra=flag) as worker:
        packed = worker.end.shake_hands().packed
        assert (packed.widths if hasattr(packed, "widths") else None) == widths
        worker.stop()


def test_the_manifest_is_hashed_by_the_worker_itself(runtime_dir: Path) -> None:
    manifest = runtime_dir / "manifest.json"
    manifest.write_text('{"b": 1, "a": "x"}')
    with WorkerProcess(command({"engine": "owned-cuda"}), runtime_dir, extra=["--manifest", str(manifest)]) as worker:
        hello = worker.end.shake_hands()
        import hashlib

        assert hello.manifest_digest == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()
        worker.stop()


# --- before HELLO ----------------------------------------------------------------------------------------------------


def imported_before_hello(program: list[str], directory: Path) -> set[str]:
    """Return the top-level modules that a worker imported before it sent HELLO, told by the interpreter itself."""
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    with WorkerProcess(program, directory, env=env) as worker:
        worker.end.event()  # HELLO, and no ACK
        worker.end.close()
        worker.wait()
        text = worker.stderr()
    names = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*([\w.]+)$", text, re.MULTILINE)
    assert "msgspec" in names
    return {name.partition(".")[0] for name in names}


def test_the_runtime_reaches_hello_without_heavy_imports(runtime_dir: Path) -> None:
    assert not imported_before_hello(command(), runtime_dir) & HEAVY


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_reaches_hello_without_its_native_library(engine: str, runtime_dir: Path) -> None:
    program = [sys.executable, "-m", f"engines.{engine}"]
    assert not imported_before_hello(program, runtime_dir) & HEAVY


# --- life and death --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_worker_dies_with_its_parent_even_while_the_socket_lives(runtime_dir: Path) -> None:
    launcher = f"""
        import subprocess, sys, time
        subprocess.Popen([*{command()!r}, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(60)
        """
    with WorkerProcess([sys.executable, "-c", textwrap.dedent(launcher)], runtime_dir) as worker:
        hello = worker.end.shake_hands()
        assert hello.pid != worker.pid
        worker.load("x", "sha256:" + "0" * 64)  # the signal is armed by now
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.closed()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1")
def test_sigusr1_dumps_all_threads_and_the_worker_goes_on(runtime_dir: Path) -> None:
    with WorkerProcess(command(), runtime_dir) as worker:
        worker.end.shake_hands()
        worker.load("x", "sha256:" + "0" * 64)
        os.kill(worker.pid, signal.SIGUSR1)
        assert worker.stop() == 0
        text = worker.stderr()
    assert text.count("most recent call first") >= 2


def test_interrupting_a_worker_by_hand_is_quiet(runtime_dir: Path) -> None:
    with WorkerProcess(command(), runtime_dir) as worker:
        worker.end.shake_hands()
        worker.load("x", "sha256:" + "0" * 64)
        os.kill(worker.pid, signal.SIGINT)
        assert worker.wait() == 130
        assert "Traceback" not in worker.stderr()


def ends(action: dict[str, object], directory: Path) -> tuple[int, str]:
    """Return the exit status and stderr of a worker that does *action* in a request."""
    with ready({"rules": [{"on": "EMBED_BATCH", "do": [action]}]}, directory) as worker:
        worker.end.send(embed(), IDS)
        return worker.wait(), worker.stderr()


def test_a_bug_in_an_engine_leaves_a_traceback_and_status_1(runtime_dir: Path) -> None:
    status, text = ends({"raise": "boom"}, runtime_dir)
    assert status == 1 and "Traceback" in text and "RuntimeError: boom" in text


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV"])
def test_a_fatal_signal_leaves_a_stack_and_its_own_status(runtime_dir: Path, name: str) -> None:
    status, text = ends({"signal": name}, runtime_dir)
    assert status == -getattr(signal, name) and "Fatal Python error" in text
