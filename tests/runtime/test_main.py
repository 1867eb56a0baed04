"""The command line, as processes: what is on stdout, which status, what is imported before HELLO."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import UNSET

from engines.protocol.messages import Ping, encode
from engines.runtime import main as runtime_main
from tests.support.scripted import command
from tests.support.worker_client import WorkerClient, WorkerEnded

pytestmark = pytest.mark.process
HEAVY = {"numpy", "llama_cpp", "onnxruntime", "onnx", "coremltools", "cuda", "objc", "CoreML", "tokenizers", "psutil"}


def run(*arguments: str, program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [*(program or command()), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def test_version_is_one_line_that_starts_with_program_and_distribution() -> None:
    result = run("--version", program=command({"version": "scripted-9"}))
    assert result.returncode == 0
    program = f"scripted-worker {version('synapse-workers')}"
    assert result.stdout == f"{program} protocol=3 engine=llama.cpp-worker engine_version=scripted-9 device=cpu\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["--socket", "/tmp/x.sock"], 2), (["--nonce", "0123456789abcdef"], 2), (["--unknown"], 2)],
)
def test_usage_goes_to_stderr(arguments: list[str], status: int) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (status, "")
    assert "--probe-floor" in result.stderr and "Traceback" not in result.stderr


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
    "words",
    [
        "--nonce 0123456789ABCDEF", "--nonce 0123456789abcde", "--nonce 0123456789abcdeg", "--socket x --pipe y",
        "--device tpu", "--device cpu:1", "--packed a", "--packed 256,0", "--version --probe-floor", "--vers",
    ],
)  # fmt: skip
def test_what_no_worker_is_started_with(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runtime_main.parser("worker", "cpu").parse_args(words.split())
    assert ended.value.code == 2 and capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--socket", "/nonexistent/x.sock"], ["--pipe", r"\\.\pipe\none"]])
def test_no_host_to_connect_to_is_one_line_and_status_1(arguments: list[str]) -> None:
    result = run(*arguments, "--nonce", "0123456789abcdef")
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1


def test_what_the_arguments_do_to_hello(tmp_path: Path) -> None:
    """The device is echoed, packed widths are advertised, the manifest is hashed by the worker itself."""
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"b": 1, "a": "x"}')
    for device in ("cpu", "cuda:1", "ane"):
        with WorkerClient(command(), device=device) as worker:
            assert worker.hello.engine.build_flags == {"device": device} and worker.hello.packed is UNSET
    arguments = ["--manifest", str(manifest), "--packed", "256,384"]
    script = {"engine": "ane-coreml-worker", "packed": True}
    with WorkerClient(command(script), device="ane", arguments=arguments) as worker:
        packed = worker.hello.packed
        assert packed is not UNSET and packed.widths == [256, 384]
        assert worker.hello.manifest_digest == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()


# --- before HELLO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [command(), *([sys.executable, "-m", f"engines.{engine}"] for engine in ("llama", "cuda", "ane"))],
    ids=["runtime", "llama", "cuda", "ane"],
)
def test_hello_comes_before_any_heavy_import(program: list[str]) -> None:
    """The interpreter itself reports what a worker imported before it sent HELLO."""
    with WorkerClient(program, env={"PYTHONPROFILEIMPORTTIME": "1"}, handshake=False) as worker:
        worker.read_frame()  # HELLO, and no ACK
        worker.hang_up()
        names = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*([\w.]+)$", worker.stderr(), re.MULTILINE)
    assert "msgspec" in names
    assert not {name.partition(".")[0] for name in names} & HEAVY


# --- how a worker ends ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_worker_dies_with_its_parent_even_while_the_socket_lives() -> None:
    launcher = f"""
        import subprocess, sys, time
        subprocess.Popen([*{command()!r}, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(60)
        """
    with WorkerClient([sys.executable, "-c", textwrap.dedent(launcher)]) as worker:
        assert worker.hello.pid != worker.process.pid
        worker.ping()  # the signal is armed by now
        worker.process.kill()
        with pytest.raises(WorkerEnded, match="after 0 of 4 bytes"):
            worker.read_frame()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1")
def test_sigusr1_dumps_all_threads_and_a_worker_interrupted_by_hand_is_quiet() -> None:
    with WorkerClient(command()) as worker:
        worker.ping()
        worker.process.send_signal(signal.SIGUSR1)
        worker.ping()
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(60) == 130
        assert worker.stderr().count("most recent call first") >= 2 and "Traceback" not in worker.stderr()


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ({"raise": "boom"}, 1, "RuntimeError: boom"),
        ({"signal": "SIGABRT"}, -signal.SIGABRT, "Fatal Python error"),
        ({"signal": "SIGSEGV"}, -signal.SIGSEGV, "Fatal Python error"),
    ],
)
def test_a_bug_or_a_fatal_signal_leaves_its_stack_and_status(action: dict[str, str], status: int, words: str) -> None:
    with WorkerClient(command({"rules": [{"on": "PING", "do": [action]}]})) as worker:
        worker.write_frame(encode(Ping("p")))
        assert worker.process.wait(60) == status
        assert words in worker.stderr()
