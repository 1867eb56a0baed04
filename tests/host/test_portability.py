"""Nothing that only one system has is imported on another: simulated in a child whose Python lacks it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from synapse_host import job, pipe

WITHOUT_UNIX = """
import asyncio, os, select, signal, socket, sys
UNIX_ONLY = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX_ONLY:
            raise ModuleNotFoundError(f"{name} does not exist here", name=name)

for name in UNIX_ONLY:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
for module, names in {
    os: ("getuid", "geteuid", "killpg", "getsid", "setsid", "pidfd_open", "waitid", "sched_getaffinity", "fork"),
    signal: ("SIGUSR1", "SIGKILL", "SIGHUP"),
    socket: ("AF_UNIX", "SO_PEERCRED"),
    select: ("poll", "epoll"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.mark.process
def test_every_module_imports_without_anything_unix_only():
    code = WITHOUT_UNIX + textwrap.dedent("""
    import importlib, pkgutil
    import engines, synapse_host
    names = [
        module.name
        for package in (engines, synapse_host)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    for name in names:
        importlib.import_module(name)
    from engines.machine import usable_cores
    assert usable_cores() >= 1
    print(*names)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    names = set(result.stdout.split())
    assert {"synapse_host.host", "synapse_host.cli.run", "engines.runtime.pipe", "engines.llama.engine"} <= names, (
        result.stderr
    )


@pytest.mark.process
def test_importing_the_supervisor_loads_neither_numpy_nor_an_engine():
    code = (
        "import sys, synapse_host.supervisor;"
        "print([n for n in sys.modules if n.split('.')[0] in ('numpy', 'psutil') or n.startswith('engines.runtime')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


def test_pipe_names_mix_directory_host_and_worker():
    name = pipe.pipe_name(Path("a"), "toy-1", pid=1)
    assert name.startswith("\\\\.\\pipe\\synapse-") and len(name) == len("\\\\.\\pipe\\synapse-") + 16
    assert name == pipe.pipe_name(Path("a"), "toy-1", pid=1)
    others = {
        pipe.pipe_name(Path(p), w, pid=n) for p, w, n in [("b", "toy-1", 1), ("a", "toy-2", 1), ("a", "toy-1", 2)]
    }
    assert len(others | {name}) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="what other systems answer")
def test_windows_parts_say_so_elsewhere():
    with pytest.raises(NotImplementedError, match="Windows"):
        pipe.listen(Path("a"), "toy-1")
    with pytest.raises(NotImplementedError, match="Windows"):
        job.contain(1)


@pytest.mark.windows
def test_a_pipe_is_the_first_and_only_instance():
    first = pipe.listen(Path("a"), "toy-1")
    try:
        with pytest.raises(OSError):
            pipe.listen(Path("a"), "toy-1")
    finally:
        first.close()
    pipe.listen(Path("a"), "toy-1").close()
