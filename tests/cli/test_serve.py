"""`synapse serve` and the verbs that talk to it, as real processes over a scripted worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from synapse_host.errors import DeadlineExceeded, EngineCrashed, InvalidRequest, QueueFull, SynapseError, revive
from tests.cli.conftest import Command, Done, Here, entered

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return found


class Running:
    """One `synapse serve --json` that is up."""

    def __init__(self, cli: Command, directory: Path, process: subprocess.Popen[str]) -> None:
        self.cli, self.directory, self.process = cli, directory, process
        self.state: dict[str, Any] = {}

    def __call__(self, verb: str, *words: str) -> Done:
        """Run a verb against this host by the command's own entry: a process of its own takes a second."""
        return entered(self.cli.arguments(verb, "--runtime-dir", str(self.directory), *words)[3:])

    def command(self, verb: str, *words: str) -> Done:
        """Run a verb as a process; the fixture's orphan check would take the host's workers for orphans."""
        environment, _ = self.cli.env()
        done = subprocess.run(
            self.cli.arguments(verb, "--runtime-dir", str(self.directory), *words),
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, verb: str, *words: str) -> subprocess.Popen[str]:
        environment, _ = self.cli.env()
        return subprocess.Popen(
            self.cli.arguments(verb, "--runtime-dir", str(self.directory), *words),
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=LIMIT_S)
        assert "Traceback" not in err, err
        return self.process.returncode, err

    def socket(self) -> Path:
        return self.directory / "synapse" / "control.sock"


@contextmanager
def running(cli: Command, directory: Path, *words: str, wait: bool = True) -> Iterator[Running]:
    environment, mark = cli.env()
    process = subprocess.Popen(
        cli.arguments("serve", "--port", "0", "--runtime-dir", str(directory), "--json", *words),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    host = Running(cli, directory, process)
    try:
        if wait:
            line = process.stdout.readline()
            if not line:
                pytest.fail(f"it did not come up: {process.stderr.read()}")
            host.state = json.loads(line)
        yield host
        if process.poll() is None:
            code, err = host.stop()
            assert code == 0, err
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            pipe.close()
    until(lambda: not workers_of(cli))
    cli.check_clean(mark)
    assert not host.socket().exists()


def workers_of(cli: Command) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "--socket" in line and any(str(cli.root) in word for word in line):
            found.append(process.info["pid"])
    return found


# --- one life --------------------------------------------------------------------------------------------------------


def test_run_ps_ping_logs_load_unload(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"ready": [{"stderr": "hello from the worker"}]})
    with running(cli, runtime_dir, "--load", "toy") as host:
        assert set(host.state) == {"host", "lanes", "workers"}
        assert host.state["lanes"]["embed"]["models"] == ["toy"]
        assert host.socket().is_socket() and host.socket().stat().st_mode & 0o777 == 0o600

        state = host.command("ps", "--json").document
        assert set(state) == {"host", "lanes", "workers"}
        assert state["host"]["pid"] == host.process.pid and not state["host"]["stopping"]
        (worker,) = state["workers"]
        assert (worker["lane"], worker["generation"], worker["model"]) == ("embed", 1, "toy")
        page = host("ps").out
        assert "LANE" in page and f"pid {worker['pid']} #1" in page and "idle" in page and "\x1b" not in page

        ping = host.command("ping", "embed")
        assert ping.code == 0 and f"pid {worker['pid']}" in ping.out and "answered in" in ping.out
        assert host("ping", "--json").document["pings"]["embed"]["round_trip_ms"] > 0

        assert host.command("logs").out == "embed [stderr] hello from the worker\n"
        assert host("logs", "toy", "--json").document["logs"] == {"embed": ["embed [stderr] hello from the worker"]}

        unloaded = host.command("unload", "toy")
        assert unloaded.code == 0 and unloaded.out == "toy is unloaded from lane embed\n"
        assert host("ps", "--json").document["lanes"]["embed"]["models"] == []
        loaded = host.command("load", "toy")
        assert loaded.code == 0 and f"pid {worker['pid']}" in loaded.out
        code, err = host.stop()
        assert (code, err) == (0, "")


def test_nothing_is_loaded_unless_asked_and_an_idle_worker_ends(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--idle", "0.2") as host:
        assert host.state["workers"] == [] and workers_of(cli) == []
        quiet = host("ping")
        assert quiet.code == 0 and "no worker" in quiet.out
        named = host("ping", "embed")
        assert named.code == 1 and "synapse load toy" in named.out
        assert "not loaded" in host("ps").out
        assert host("load", "toy").code == 0
        until(lambda: not workers_of(cli))


def test_a_broken_bundle_is_left_out_unless_it_is_named(cli: Command, runtime_dir: Path) -> None:
    broken = cli.root / "models" / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")
    (cli.root / "models" / "toy").rename(cli.root / "elsewhere")
    with running(cli, runtime_dir, "--load", str(cli.root / "elsewhere")) as host:
        assert list(host.state["lanes"]) == ["embed"] and host.state["lanes"]["embed"]["model"] == "elsewhere"
    done = cli("serve", "--port", "0", "--runtime-dir", str(runtime_dir), "--load", "broken")
    assert done.code == 2 and "broken" in done.err


def test_a_failure_there_is_the_same_failure_here(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"rules": [{"on": "LOAD", "do": [{"stderr": "it broke"}, {"abort": True}]}]})
    with running(cli, runtime_dir) as host:
        first = host("load", "toy")
        assert first.code == 1 and "SIGABRT" in first.err and "| it broke" in first.err
        second = host("load", "toy", "--json")
        error = second.document["error"]
        assert second.code == 3 and error["code"] == "engine_crashed" and error["details"]["quarantined"] is True
        assert "quarantined" in host("ps").out and "last: SIGABRT during load" in host("ps").out
        assert host("unload", "toy").code == 0
        unknown = host("load", "toyy")
        assert unknown.code == 2 and "no model 'toyy' (it has: toy)" in unknown.err
        assert host("ping", "nope").code == 2


def test_a_shut_legacy_lane_is_opened_by_a_probe_alone(cli: Command, runtime_dir: Path) -> None:
    dying = {"rules": [{"on": "LOAD", "do": [{"abort": True}]}]}
    cli.setup({"state": str(cli.root / "spawns"), "generations": [dying, dying, dying, {}]}, kind="legacy")
    with running(cli, runtime_dir) as host:
        assert [host("load", "toy").code for _ in range(2)] == [1, 3]
        assert host("unload", "toy").code == 0
        shut = host("load", "toy")
        assert shut.code == 3 and "Clear it: synapse probe embed" in shut.err
        failed = host("probe", "embed")
        assert failed.code == 3 and "SIGABRT" in failed.err, "it stays shut"
        opened = host.command("probe", "toy")
        assert opened.code == 0 and opened.out.startswith("embed is proven and open: pid ")
        assert set(host("probe", "embed", "--json").document) == {"host", "lanes", "workers"}
        assert host("load", "toy").code == 0


def test_a_load_at_start_that_fails_ends_the_command(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"rules": [{"on": "LOAD", "do": [{"err": {"code": "oom", "msg": "no room"}}]}]})
    done = cli("serve", "--port", "0", "--runtime-dir", str(runtime_dir), "--load", "toy")
    assert done.code == 1 and "no room" in done.err and done.out == ""
    assert not (runtime_dir / "synapse" / "control.sock").exists()


# --- who else is there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("ps",), ("ping",), ("logs",), ("load", "toy"), ("unload", "toy"), ("probe", "embed")],
    ids=lambda words: words[0],
)
def test_no_host(here: Here, runtime_dir: Path, words: tuple[str, ...]) -> None:
    done = here(*words, "--runtime-dir", str(runtime_dir))
    assert done.code == 2 and done.out == ""
    assert done.err == f"synapse: no host runs on {runtime_dir}: start it with synapse serve\n"
    error = here(*words, "--runtime-dir", str(runtime_dir / "none"), "--json").document["error"]
    assert error["details"]["reason"] == "no_host"
    assert not (runtime_dir / "none").exists()


def test_a_second_host_is_refused_and_told_by_whom(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir) as host:
        second = host("serve", "--port", "0")
        started = time.strftime("%H:%M", time.localtime(psutil.Process(host.process.pid).create_time()))
        assert second.code == 2 and second.out == ""
        assert second.err == (
            f"synapse: runtime directory {runtime_dir} is in use by pid {host.process.pid} "
            f"(synapse, started {started}). Stop it or pass another --runtime-dir.\n"
        )
        assert host("ps").code == 0


# --- the end ---------------------------------------------------------------------------------------------------------


def draining(cli: Command, host: Running) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a load that runs and another that waits behind it."""
    started = cli.root / "started"
    loading = host.start("load", "toy", "--json")
    until(started.exists)
    queued = host.start("load", "toy", "--json")
    until(lambda: host("ps", "--json").document["lanes"]["embed"]["waiting"] == 1)
    return loading, queued


def script(cli: Command) -> dict[str, Any]:
    do = [{"touch": str(cli.root / "started")}, {"wait_for": str(cli.root / "go")}]
    return {"rules": [{"on": "LOAD", "do": do}]}


def test_sigterm_drains_the_running_is_answered_and_the_queued_typed(cli: Command, runtime_dir: Path) -> None:
    cli.setup(script(cli))
    with running(cli, runtime_dir) as host:
        loading, queued = draining(cli, host)
        host.process.send_signal(signal.SIGTERM)
        out, _ = queued.communicate(timeout=LIMIT_S)
        error = json.loads(out)["error"]
        assert (queued.returncode, error["code"], error["class"]) == (1, "queue_full", "transient")
        assert error["safe_to_retry_same_request"] is True
        state = host("ps", "--json").document
        assert state["host"]["stopping"] is True and state["lanes"]["embed"]["worker_pid"]
        late = host("load", "toy", "--json").document["error"]
        assert late["code"] == "queue_full" and host.process.poll() is None
        (cli.root / "go").touch()
        out, err = loading.communicate(timeout=LIMIT_S)
        assert (loading.returncode, err) == (0, ""), out
        assert json.loads(out)["lanes"]["embed"]["model"] == "toy"
        _, err = host.process.communicate(timeout=LIMIT_S)
        assert host.process.returncode == 0


def test_a_second_signal_ends_now(cli: Command, runtime_dir: Path) -> None:
    cli.setup(script(cli))
    with running(cli, runtime_dir, "--drain", "1000") as host:
        loading, queued = draining(cli, host)
        host.process.send_signal(signal.SIGTERM)
        queued.communicate(timeout=LIMIT_S)
        assert host.process.poll() is None and loading.poll() is None
        code, _ = host.stop()
        assert code == 0
        out, _ = loading.communicate(timeout=LIMIT_S)
        assert loading.returncode == 1 and json.loads(out)["error"]["code"] in ("queue_full", "engine_crashed")


def test_a_drain_has_its_limit(cli: Command, runtime_dir: Path) -> None:
    cli.setup(script(cli))
    with running(cli, runtime_dir, "--drain", "0.2") as host:
        loading, queued = draining(cli, host)
        assert host.stop()[0] == 0
        for process in (loading, queued):
            out, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 1 and json.loads(out)["error"]["class"] == "transient"


def test_ctrl_c_is_130(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        assert host.stop(signal.SIGINT)[0] == 130


def test_a_signal_while_models_load(cli: Command, runtime_dir: Path) -> None:
    cli.setup(script(cli))
    with running(cli, runtime_dir, "--load", "toy", wait=False) as host:
        until((cli.root / "started").exists)
        code, err = host.stop()
        assert (code, err) == (0, "")


def test_a_worker_that_dies_is_told_on_stderr_and_in_ps(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        os.kill(host.state["workers"][0]["pid"], signal.SIGKILL)
        state = until(lambda: (s := host("ps", "--json").document) and s["lanes"]["embed"]["strikes"] and s)
        assert state["workers"] == [] and state["lanes"]["embed"]["last_fault"]["signal"] == "SIGKILL"
        assert host("load", "toy").code == 0
        code, err = host.stop()
        assert code == 0 and "worker lost: lane=embed" in err and "SIGKILL" in err


def test_a_host_that_goes_away_in_the_middle_of_an_answer(cli: Command, runtime_dir: Path) -> None:
    cli.setup(script(cli))
    environment, _ = cli.env()
    process = subprocess.Popen(
        cli.arguments("serve", "--port", "0", "--runtime-dir", str(runtime_dir), "--json"),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        host = Running(cli, runtime_dir, process)
        assert process.stdout is not None and process.stdout.readline()
        loading = host.start("load", "toy")
        until((cli.root / "started").exists)
        process.kill()
        _, err = loading.communicate(timeout=LIMIT_S)
    assert loading.returncode == 1 and "went away before it answered" in err and err.count("\n") == 1
    until(lambda: not workers_of(cli))
    host.socket().unlink()


# --- following -------------------------------------------------------------------------------------------------------


def test_logs_follow(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"rules": [{"on": "LOAD", "do": [{"stderr": "loading now"}, {"stdout": "and \x1b[31mred"}]}]})
    with running(cli, runtime_dir) as host:
        follow = host.start("logs", "-f")
        try:
            assert follow.stdout is not None
            assert host("load", "toy").code == 0
            lines = {follow.stdout.readline(), follow.stdout.readline()}
            assert lines == {"embed [stderr] loading now\n", "embed [stdout] and \x1b[31mred\n"}
        finally:
            follow.send_signal(signal.SIGINT)
            _, err = follow.communicate(timeout=LIMIT_S)
        assert follow.returncode == 130 and err == "synapse: interrupted\n"
        assert host("logs", "-f", "--json").code == 2
        follow = host.start("logs", "embed", "-f")
        assert follow.stdout is not None and follow.stdout.readline()
        assert host.stop()[0] == 0
        _, err = follow.communicate(timeout=LIMIT_S)
        assert follow.returncode == 1 and "went away" in err


# --- the port --------------------------------------------------------------------------------------------------------


def test_the_port_of_this_machine_alone(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        url = host.state["host"]["url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            text = reply.read().decode()
        assert 'synapse_worker_requests_total{lane="embed:toy",op="load",outcome="ok"} 1.0' in text
        assert url in host("ps").out
        printed = host("ps", "--metrics")
        assert printed.code == 0 and printed.out.startswith("# HELP synapse_worker_")
        assert "synapse_worker_" in host("ps", "--metrics", "--json").document["text"]
        listening = [
            c.laddr.ip for c in psutil.Process(host.process.pid).net_connections("inet") if c.status == "LISTEN"
        ]
        assert listening == ["127.0.0.1"]
        port = url.rpartition(":")[2]
        taken = cli("serve", "--port", port, "--runtime-dir", str(runtime_dir / "other"), bare=True)
        assert taken.code == 2 and f"127.0.0.1:{port}" in taken.err and "another --host or --port" in taken.err


@pytest.mark.parametrize("verb", ["serve", "ps"])
def test_without_the_extra_it_says_what_to_install(here: Here, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr("synapse_host.serve.find_spec", lambda name: None)
    monkeypatch.setattr("synapse_host.cli.remote.reachable", lambda directory: directory)
    done = here(verb, "--json")
    assert done.code == 4 and done.document["error"]["code"] == "backend_missing"
    assert "pip install 'synapse-workers[serve]'" in done.document["error"]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "needs an API key"),
        (("--host", "no.such.name.invalid"), "can't serve on no.such.name.invalid:0"),
        (("--api-key-file", "none"), "the API key can't be read"),
        (("--api-key-file", "short"), "16 to 1024 printable characters"),
        (("--api-key-file", "open"), "others may read this API key (mode 0640). Run: chmod 600 open"),
        (("--cors", "*"), "is no origin"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_what_would_be_unsafe_is_refused(
    cli: Command, here: Here, runtime_dir: Path, words: tuple[str, ...], said: str
) -> None:
    for name, mode in (("short", 0o600), ("open", 0o640)):
        (cli.root / name).write_text("secret\n")
        (cli.root / name).chmod(mode)
    done = here("serve", "--port", "0", "--runtime-dir", str(runtime_dir), *words)
    assert done.code == 2 and said in done.err and "secret" not in done.err


def test_on_a_terminal_it_shows_what_is_up(cli: Command, runtime_dir: Path) -> None:
    words = ("run", "--port", "0", "--runtime-dir", str(runtime_dir), "--load", "toy")
    code, text = cli.on_terminal(*words, ends="Stop: Ctrl-C")
    assert code == 0
    assert "loaded toy in" in text and "LANE" in text and "\x1b[" in text and str(runtime_dir) in text
    assert not workers_of(cli)


# --- the operator's end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("late", details={"lane_id": "embed"}),
        QueueFull("full"),
        EngineCrashed("dead", details={"quarantined": True}, retry_after_ms=5000),
        EngineCrashed("dead", details={"quarantined": False}),
        InvalidRequest("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_wire(error: SynapseError) -> None:
    again = revive(json.loads(json.dumps(error.to_dict())))
    assert again.to_dict() == error.to_dict() and again.exit_code == error.exit_code


def test_an_unknown_code_keeps_its_words() -> None:
    assert revive({"code": "from_the_future", "message": "m"}).to_dict()["code"] == "from_the_future"
    assert revive({"code": "oom", "message": "m"}).to_dict()["retry_after_ms"] == 250
