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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from synapse_host.errors import EngineCrashed, QueueFull, revive
from tests.cli.conftest import Command, Done, Here, entered, finished

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return found


@dataclass
class Running:
    """One `synapse serve --json` that is up."""

    cli: Command
    directory: Path
    process: subprocess.Popen[str]
    state: dict[str, Any] = field(default_factory=dict)

    def __call__(self, verb: str, *words: str) -> Done:
        """Run a verb against this host by the command's own entry: a process of its own takes a second."""
        return entered(self.cli.arguments(verb, "--runtime-dir", str(self.directory), *words))

    def start(self, verb: str, *words: str) -> subprocess.Popen[str]:
        return self.cli.spawn(verb, "--runtime-dir", str(self.directory), *words)

    def command(self, verb: str, *words: str) -> Done:
        """Run a verb as a process."""
        return finished(self.start(verb, *words))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Done:
        self.process.send_signal(number)
        return finished(self.process)

    def socket(self) -> Path:
        return self.directory / "synapse" / "control.sock"


@contextmanager
def running(cli: Command, directory: Path, *words: str, wait: bool = True) -> Iterator[Running]:
    process = cli.spawn("serve", "--port", "0", "--runtime-dir", str(directory), "--json", *words)
    assert process.stdout is not None and process.stderr is not None
    host = Running(cli, directory, process)
    with process:
        try:
            if wait:
                host.state = json.loads(process.stdout.readline() or pytest.fail(process.stderr.read()))
            yield host
            if process.poll() is None:
                done = host.stop()
                assert done.code == 0, done.err
        finally:
            process.kill()
    until(lambda: not cli.workers())
    cli.check_clean()
    assert not host.socket().exists()


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

        assert host.command("unload", "toy").out == "toy is unloaded from lane embed\n"
        assert host("ps", "--json").document["lanes"]["embed"]["models"] == []
        loaded = host.command("load", "toy")
        assert loaded.code == 0 and f"pid {worker['pid']}" in loaded.out
        assert host.stop() == Done(0, "", "")


def test_nothing_is_loaded_unless_asked_and_an_idle_worker_ends(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--idle", "0.2") as host:
        assert host.state["workers"] == cli.workers() == []
        quiet, named = host("ping"), host("ping", "embed")
        assert quiet.code == 0 and "no worker" in quiet.out
        assert named.code == 1 and "synapse load toy" in named.out
        assert "not loaded" in host("ps").out
        assert host("load", "toy").code == 0
        until(lambda: not cli.workers())


def test_a_broken_bundle_is_left_out_unless_it_is_named(cli: Command, runtime_dir: Path) -> None:
    broken = cli.root / "models" / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")
    (cli.root / "models" / "toy").rename(cli.root / "elsewhere")
    with running(cli, runtime_dir, "--load", str(cli.root / "elsewhere")) as host:
        assert [lane["model"] for lane in host.state["lanes"].values()] == ["elsewhere"]
    cli.setup({"rules": [{"on": "LOAD", "do": [{"err": {"code": "oom", "msg": "no room"}}]}]})
    for model, code, said in (("broken", 2, "broken"), (str(cli.root / "elsewhere"), 1, "no room")):
        done = cli("serve", "--port", "0", "--runtime-dir", str(runtime_dir), "--load", model)
        assert (done.code, done.out) == (code, "") and said in done.err
        assert not (runtime_dir / "synapse" / "control.sock").exists()


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
        assert [host(verb, "toy").code for verb in ("load", "load", "unload")] == [1, 3, 0]
        shut = host("load", "toy")
        assert shut.code == 3 and "Clear it: synapse probe embed" in shut.err
        failed = host("probe", "embed")
        assert failed.code == 3 and "SIGABRT" in failed.err, "it stays shut"
        opened = host.command("probe", "toy")
        assert opened.code == 0 and opened.out.startswith("embed is proven and open: pid ")
        assert host("load", "toy").code == 0


# --- who else is there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["ps", "ping", "logs", "load toy", "unload toy", "probe embed"])
def test_no_host(here: Here, runtime_dir: Path, words: str) -> None:
    done = here(*words.split(), "--runtime-dir", str(runtime_dir))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"synapse: no host runs on {runtime_dir}: start it with synapse serve\n"
    error = here(*words.split(), "--runtime-dir", str(runtime_dir / "none"), "--json").document["error"]
    assert error["details"]["reason"] == "no_host" and not (runtime_dir / "none").exists()


def test_a_second_host_is_refused_and_told_by_whom(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir) as host:
        second = host("serve", "--port", "0")
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(psutil.Process(host.process.pid).create_time()))
        assert second.code == 2 and second.out == ""
        assert second.err == (
            f"synapse: runtime directory {runtime_dir} is in use by pid {host.process.pid} "
            f"(synapse, started {started}). Stop it or pass another --runtime-dir.\n"
        )
        assert host("ps").code == 0


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(cli: Command) -> Command:
    """A command whose workers hold LOAD until there is a file ``go``; ``started`` says that one does."""
    do = [{"touch": str(cli.root / "started")}, {"wait_for": str(cli.root / "go")}]
    return cli.setup({"rules": [{"on": "LOAD", "do": do}]})


def draining(host: Running) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a load that runs and another that waits behind it."""
    loading = host.start("load", "toy", "--json")
    until((host.cli.root / "started").exists)
    queued = host.start("load", "toy", "--json")
    until(lambda: host("ps", "--json").document["lanes"]["embed"]["waiting"] == 1)
    return loading, queued


def test_sigterm_drains_the_running_is_answered_and_the_queued_typed(held: Command, runtime_dir: Path) -> None:
    with running(held, runtime_dir) as host:
        loading, queued = draining(host)
        host.process.send_signal(signal.SIGTERM)
        refused = finished(queued)
        error = refused.document["error"]
        assert (refused.code, error["code"], error["class"]) == (1, "queue_full", "transient")
        assert error["safe_to_retry_same_request"] is True
        state = host("ps", "--json").document
        assert state["host"]["stopping"] is True and state["lanes"]["embed"]["worker_pid"]
        late = host("load", "toy", "--json").document["error"]
        assert late["code"] == "queue_full" and host.process.poll() is None
        (held.root / "go").touch()
        answered = finished(loading)
        assert (answered.code, answered.err, finished(host.process).code) == (0, "", 0)
        assert answered.document["lanes"]["embed"]["model"] == "toy"


@pytest.mark.parametrize(("drain", "again"), [("1000", True), ("0.2", False)])
def test_a_drain_ends_at_a_second_signal_or_its_limit(
    held: Command, runtime_dir: Path, drain: str, again: bool
) -> None:
    with running(held, runtime_dir, "--drain", drain) as host:
        loading, queued = draining(host)
        if again:
            host.process.send_signal(signal.SIGTERM)
            assert finished(queued).code == 1
            assert host.process.poll() is None and loading.poll() is None
        assert host.stop().code == 0
        for done in [finished(loading), *([] if again else [finished(queued)])]:
            assert done.code == 1 and done.document["error"]["code"] in ("queue_full", "engine_crashed")


def test_ctrl_c_is_130(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        assert host.stop(signal.SIGINT).code == 130


def test_a_signal_while_models_load(held: Command, runtime_dir: Path) -> None:
    with running(held, runtime_dir, "--load", "toy", wait=False) as host:
        until((held.root / "started").exists)
        assert host.stop() == Done(0, "", "")


def test_a_worker_that_dies_is_told_on_stderr_and_in_ps(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        os.kill(host.state["workers"][0]["pid"], signal.SIGKILL)
        state = until(lambda: (s := host("ps", "--json").document) and s["lanes"]["embed"]["strikes"] and s)
        assert state["workers"] == [] and state["lanes"]["embed"]["last_fault"]["signal"] == "SIGKILL"
        assert host("load", "toy").code == 0
        done = host.stop()
        assert done.code == 0 and "worker lost: lane=embed" in done.err and "SIGKILL" in done.err


def test_a_host_that_goes_away_in_the_middle_of_an_answer(held: Command, runtime_dir: Path) -> None:
    with running(held, runtime_dir) as host:
        loading = host.start("load", "toy")
        until((held.root / "started").exists)
        host.process.kill()
        done = finished(loading)
        assert done.code == 1 and "went away before it answered" in done.err and done.err.count("\n") == 1
        host.process.wait(LIMIT_S)
        host.socket().unlink()


def test_logs_follow(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"rules": [{"on": "LOAD", "do": [{"stderr": "loading now"}, {"stdout": "and \x1b[31mred"}]}]})
    with running(cli, runtime_dir) as host:
        follow = host.start("logs", "-f")
        assert follow.stdout is not None
        assert host("load", "toy").code == 0
        lines = {follow.stdout.readline(), follow.stdout.readline()}
        assert lines == {"embed [stderr] loading now\n", "embed [stdout] and \x1b[31mred\n"}
        follow.send_signal(signal.SIGINT)
        done = finished(follow)
        assert (done.code, done.err) == (130, "synapse: interrupted\n")
        assert host("logs", "-f", "--json").code == 2
        follow = host.start("logs", "embed", "-f")
        assert follow.stdout is not None and follow.stdout.readline()
        assert host.stop().code == 0
        done = finished(follow)
        assert done.code == 1 and "went away" in done.err


# --- the port --------------------------------------------------------------------------------------------------------


def test_the_port_of_this_machine_alone(cli: Command, runtime_dir: Path) -> None:
    with running(cli, runtime_dir, "--load", "toy") as host:
        url = host.state["host"]["url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            text = reply.read().decode()
        assert 'synapse_worker_requests_total{lane="embed:toy",op="load",outcome="ok"} 1.0' in text
        assert url in host("ps").out
        assert host("ps", "--metrics").out.startswith("# HELP synapse_worker_")
        assert "synapse_worker_" in host("ps", "--metrics", "--json").document["text"]
        connections = psutil.Process(host.process.pid).net_connections("inet")
        assert [one.laddr.ip for one in connections if one.status == "LISTEN"] == ["127.0.0.1"]
        port = url.rpartition(":")[2]
        taken = host("serve", "--port", port)
        assert taken.code == 2 and f"127.0.0.1:{port}" in taken.err and "another --host or --port" in taken.err


@pytest.mark.parametrize("verb", ["serve", "ps"])
def test_without_the_extra_it_says_what_to_install(here: Here, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr("synapse_host.serve.find_spec", lambda name: None)
    monkeypatch.setattr("synapse_host.cli.remote.reachable", lambda directory: directory)
    done = here(verb, "--json")
    assert done.code == 4 and done.document["error"]["code"] == "backend_missing"
    assert "pip install 'synapse-workers[serve]'" in done.document["error"]["message"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--host", "0.0.0.0", "needs an API key"),
        ("--host", "no.such.name.invalid", "can't serve on no.such.name.invalid:0"),
        ("--api-key-file", "none", "the API key can't be read"),
        ("--api-key-file", "short", "16 to 1024 printable characters"),
        ("--api-key-file", "open", "others may read this API key (mode 0640). Run: chmod 600 open"),
        ("--cors", "*", "is no origin"),
    ],
)
def test_what_would_be_unsafe_is_refused(
    cli: Command, here: Here, runtime_dir: Path, option: str, value: str, said: str
) -> None:
    for name, mode in (("short", 0o600), ("open", 0o640)):
        (cli.root / name).write_text("secret\n")
        (cli.root / name).chmod(mode)
    done = here("serve", "--port", "0", "--runtime-dir", str(runtime_dir), option, value)
    assert done.code == 2 and said in done.err and "secret" not in done.err


def test_on_a_terminal_it_shows_what_is_up(cli: Command, runtime_dir: Path) -> None:
    words = ("run", "--port", "0", "--runtime-dir", str(runtime_dir), "--load", "toy")
    code, text = cli.on_terminal(*words, ends="Stop: Ctrl-C")
    assert (code, cli.workers()) == (0, [])
    assert "loaded toy in" in text and "LANE" in text and "\x1b[" in text and str(runtime_dir) in text


def test_errors_survive_the_wire() -> None:
    quarantined = EngineCrashed("dead", details={"quarantined": True}, retry_after_ms=5000)
    for error in (quarantined, EngineCrashed("dead", details={"quarantined": False}), QueueFull("full")):
        again = revive(json.loads(json.dumps(error.to_dict())))
        assert again.to_dict() == error.to_dict() and again.exit_code == error.exit_code
    assert revive({"code": "from_the_future", "message": "m"}).to_dict()["code"] == "from_the_future"
    assert revive({"code": "oom", "message": "m"}).to_dict()["retry_after_ms"] == 250
