#!/usr/bin/env python3
"""Make .venv and install this project with everything a machine can use. Standard library only.

Safe to run again: a stamp of pyproject.toml and the interpreter makes it instant. Any Python may start it (it looks for
3.11 to 3.13 itself); the compiler is needed once, for llama-cpp-python. The log of a failed step is .venv-setup.log.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".synapse-setup"
LOG = ROOT / ".venv-setup.log"
EXTRAS = "llama,cuda,ane,metrics,chat,dev"
NVIDIA = "cuda-libraries"
"""What the CUDA provider is linked against, 2 GB: only where a driver is."""
DRIVER = Path("/proc/driver/nvidia/version")
OLDEST, NEWEST = (3, 11), (3, 13)
WIDTH = 74
ILLEGAL = re.compile(r"error: |ERROR: |CMake Error|fatal error:|No matching distribution|Could not find", re.IGNORECASE)


def main() -> int:
    """Set up and return 0, or say in one line what is missing and return 1."""
    python = _venv_python()
    if python is not None and _stamp() == _read(STAMP):
        return 0
    try:
        if python is None:
            base = _base_python()
            with Step(f"Setting up .venv (Python {_version(base)})"):
                shutil.rmtree(VENV, ignore_errors=True)
                _run(base, "-m", "venv", str(VENV))
            python = _venv_python()
            if python is None:
                raise SetupError(".venv was made but its Python does not start; see " + LOG.name)
        _compile_llama(python)
        with Step("Installing the project and its tools"):
            _run(python, "-m", "pip", "install", "-e", ".[" + _extras() + "]")
        STAMP.write_text(_stamp())
    except SetupError as exc:
        print("setup: " + str(exc), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted", file=sys.stderr)
        return 130
    return 0


class SetupError(Exception):
    """A step failed; the message says what to do."""


class Step:
    """One line: what runs, dots, how long it took. On a terminal the seconds tick while it runs."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.monotonic()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Step:
        if sys.stdout.isatty():
            self._ticker.start()
        else:
            print(self.label + " …", flush=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        if self._ticker.is_alive():
            self._ticker.join()
        word = "done" if kind is None else "FAILED"
        start = "\r" if sys.stdout.isatty() else ""
        print(start + self._line() + " " + word + "  " + _took(time.monotonic() - self.started), flush=True)

    def _line(self) -> str:
        return (self.label + " ").ljust(WIDTH, ".")

    def _tick(self) -> None:
        while not self._over.wait(1.0):
            print("\r" + self._line() + " " + _took(time.monotonic() - self.started) + " ", end="", flush=True)


def _took(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes else f"{rest} s"


def _compile_llama(python: str) -> None:
    if _ok(python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('llama_cpp') is None)"):
        return
    match = re.search(r"llama-cpp-python>=([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pinned = match.group(1) if match else ""
    compiler = _compiler()
    cores = os.cpu_count() or 1
    label = f"Compiling llama-cpp-python {pinned} (about {max(1, round(8 / cores))} minutes on {cores} cores)"
    try:
        with Step(label):
            _run(python, "-m", "pip", "install", "llama-cpp-python>=" + pinned, "gguf>=0.17")
    except SetupError:
        if compiler is None:
            raise SetupError(
                "llama-cpp-python is compiled here and no C++ compiler was found (looked for $CXX, c++, g++, clang++). "
                + _compiler_hint()
            ) from None
        raise


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _compiler_hint() -> str:
    if sys.platform == "darwin":
        return "Install one: xcode-select --install"
    if sys.platform == "win32":
        return "Install the Visual Studio Build Tools with the C++ workload."
    return "Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), apk add g++ (Alpine)"


def _base_python() -> str:
    """Return the newest supported Python: this one, one on PATH, or one that pyenv keeps."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    minors = range(NEWEST[1], OLDEST[1] - 1, -1)
    names = [f"python3.{minor}" for minor in minors]
    candidates = [found for found in map(shutil.which, names) if found]
    for minor in minors:
        candidates += [str(path) for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    for candidate in candidates:
        if _ok(
            candidate, "-c", "import venv, ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
        ):
            return candidate
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise SetupError(f"needs Python 3.11, 3.12 or 3.13 (this is {this}, no other was found); install one, run again")


def _venv_python() -> str | None:
    python = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    usable = "import pip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    return str(python) if python.exists() and _ok(str(python), "-c", usable) else None


def _version(python: str) -> str:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()


def _ok(python: str, *arguments: str) -> bool:
    try:
        done = subprocess.run(  # noqa: S603 - fixed steps, no shell
            [python, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def _run(*command: str) -> None:
    """Run a step with its output in the log; SetupError with the telling line when it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with LOG.open("w", encoding="utf-8", errors="replace") as log:
        log.write("$ " + " ".join(command) + "\n")
        log.flush()
        done = subprocess.run(  # noqa: S603 - fixed steps, no shell
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        LOG.unlink()
        return
    lines = [line.strip() for line in LOG.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if ILLEGAL.search(line)] or lines
    why = telling[0][:300] if telling else "it said nothing"
    hint = ""
    if "ensurepip" in " ".join(lines):
        hint = " (Debian and Ubuntu: apt-get install python3-venv)"
    raise SetupError(f"{' '.join(command[1:4])} failed: {why}{hint}. The whole log: {LOG.name}")


def _extras() -> str:
    found = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    return EXTRAS + "," + NVIDIA if found else EXTRAS


def _stamp() -> str:
    digest = hashlib.sha256()
    digest.update((ROOT / "pyproject.toml").read_bytes())
    digest.update(_extras().encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest() + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
