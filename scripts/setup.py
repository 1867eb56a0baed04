#!/usr/bin/env python3
"""Make .venv and install this project with everything this machine can use. Standard library only.

Any Python may start it. The environment gets the Python that the variable PYTHON names; without it the one that an
existing .venv has, the one that runs this script, or the newest supported one on PATH or in pyenv. The variable VENV
names another folder than .venv. Versions come from constraints.txt. Safe to run again: a stamp of everything that
decides makes it instant. A compiler is needed once, for llama-cpp-python. The log of a failed step is .venv-setup.log.

`setup.py --pythons` only prints the supported Pythons of this machine, a line each: version, space, program.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / (os.environ.get("VENV") or ".venv")
STAMP = VENV / ".synapse-setup"
LOG = ROOT / ".venv-setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
SUPPORTED = ("3.13", "3.12", "3.11")
EXTRAS = "llama,cuda,ane,serve,hub,parquet,chat,fast,dev"
NVIDIA = "cuda-libraries"
"""What the CUDA provider is linked against, 2 GB: only where a driver is."""
DRIVER = Path("/proc/driver/nvidia/version")
TELLING = re.compile(r"error: |CMake Error|No matching distribution|Could not find", re.IGNORECASE)
COMPILERS = {
    "darwin": "Install one: xcode-select --install",
    "win32": "Install the Visual Studio Build Tools with the C++ workload.",
    "linux": "Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), apk add g++ (Alpine)",
}


class SetupError(Exception):
    """A step failed; the message says what to do."""


def main() -> int:
    """Set up and return 0, or say in one line what is missing and return 1."""
    if sys.argv[1:] == ["--pythons"]:
        print("\n".join(f"{minor} {program}" for minor, program in pythons().items()))
        return 0
    try:
        set_up()
    except SetupError as exc:
        print(f"setup: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted", file=sys.stderr)
        return 130
    return 0


def set_up() -> None:
    """Make the environment where it is missing or of another Python than PYTHON asks for, and install what changed."""
    python = str(VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    asked = os.environ.get("PYTHON")
    present = version(python, "pip")
    if present not in SUPPORTED or (asked and present != version(asked)):
        base = base_python(asked)
        with step(f"Setting up {VENV.name} (Python {version(base)})"):
            shutil.rmtree(VENV, ignore_errors=True)
            run(base, "-m", "venv", str(VENV))
    elif STAMP.exists() and STAMP.read_text() == stamp():
        return
    links = compiled_llama(python)
    with step("Installing the project and its tools"):
        run(python, "-m", "pip", "install", "-c", str(CONSTRAINTS), *links, "-e", f".[{extras()}]")
    STAMP.write_text(stamp())


def base_python(asked: str | None) -> str:
    """Return the Python to make the environment with."""
    if asked:
        if version(asked) in SUPPORTED:
            return asked
        raise SetupError(f"PYTHON={asked} is not a Python 3.11, 3.12 or 3.13 with the module venv")
    found = next(iter(pythons().values()), None)
    if found is None:
        this = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"needs Python 3.11, 3.12 or 3.13 (this is {this}, no other was found); install one and run again, "
            "or name one with PYTHON=/path/to/python"
        )
    return found


def pythons() -> dict[str, str]:
    """Return version -> program of the supported Pythons here: this one first, then PATH and pyenv, newest first."""
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = {this: sys.executable} if this in SUPPORTED else {}
    for minor in SUPPORTED:
        kept = sorted(map(str, Path.home().glob(f".pyenv/versions/{minor}.*/bin/python")))
        for program in [shutil.which(f"python{minor}"), *kept]:
            if minor not in found and program and version(program, "venv, ensurepip") == minor:
                found[minor] = program
    return found


def version(program: str, modules: str = "venv") -> str | None:
    """Return such as '3.12' for a Python that has *modules*, None for anything else."""
    script = f"import sys, {modules}; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(  # noqa: S603 - fixed steps, no shell
            [program, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def compiled_llama(python: str) -> list[str]:
    """Have llama-cpp-python compiled once; return the pip options that find a wheel which another Python compiled.

    pip's cache keeps what each Python compiled apart, but this wheel (py3-none) serves all of them.
    """
    if version(python, "llama_cpp.llama_cpp") is not None:
        return []
    pinned = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("llama-cpp-python=="))
    wheel = pinned.replace("-", "_").replace("==", "-") + "-py3-none-"
    listing = [python, "-m", "pip", "cache", "list", "--format", "abspath", "llama_cpp_python"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=False)  # noqa: S603
    cached = [Path(line).parent for line in listed.stdout.splitlines() if Path(line).name.startswith(wheel)]
    if cached:
        return [f"--find-links={folder}" for folder in cached]
    cores = os.cpu_count() or 1
    label = f"Compiling {pinned.replace('==', ' ')} (about {max(1, round(8 / cores))} minutes on {cores} cores)"
    try:
        with step(label):
            run(python, "-m", "pip", "install", "-c", str(CONSTRAINTS), "llama-cpp-python")
    except SetupError as exc:
        names = (os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl")
        if any(name and shutil.which(name) for name in names):
            raise
        hint = COMPILERS.get(sys.platform, "Install one.")
        raise SetupError(
            "llama-cpp-python is compiled here and no C++ compiler was found (looked for $CXX, c++, g++, clang++). "
            + hint
        ) from exc
    return []


@contextmanager
def step(label: str) -> Iterator[None]:
    """Print one line: what runs, dots, how long it took. Off a terminal (a log) the label has a line of its own."""
    dots = f"{label} ".ljust(74, ".")
    ticking = sys.stdout.isatty()
    print(dots if ticking else f"{label} …", end="" if ticking else "\n", flush=True)
    started, outcome = time.monotonic(), "FAILED"
    try:
        yield
        outcome = "done"
    finally:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        took = f"{minutes} m {seconds:02d} s" if minutes else f"{seconds} s"
        print(f"{'' if ticking else dots} {outcome}  {took}", flush=True)


def run(*command: str) -> None:
    """Run a command with its output in the log; SetupError with the telling line when it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with LOG.open("w", encoding="utf-8", errors="replace") as log:
        print("$", *command, file=log, flush=True)
        done = subprocess.run(  # noqa: S603 - fixed steps, no shell
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    if done.returncode == 0:
        LOG.unlink()
        return
    lines = [line.strip() for line in LOG.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    why = next(filter(TELLING.search, lines), lines[-1])[:300]
    hint = " (Debian and Ubuntu: apt-get install python3-venv)" if "ensurepip" in " ".join(lines) else ""
    raise SetupError(f"{' '.join(command[1:4])} failed: {why}{hint}. The whole log: {LOG.name}")


def extras() -> str:
    """Return the extras of pyproject.toml that this machine can use."""
    nvidia = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    return f"{EXTRAS},{NVIDIA}" if nvidia else EXTRAS


def stamp() -> str:
    """Return a digest of everything that decides what is installed."""
    digest = hashlib.sha256(f"{extras()} {ROOT}".encode())
    for file in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(file.read_bytes())
    return digest.hexdigest() + "\n"


if __name__ == "__main__":
    sys.exit(main())
