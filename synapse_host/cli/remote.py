"""The operator's end of a running host: where it listens, one request and its answer, errors as they were raised."""

from __future__ import annotations

import argparse
import json
import os
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from synapse_host import errors
from synapse_host.errors import DeadlineExceeded, InvalidRequest, SynapseError
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory, peer_of

MAX_ANSWER: Final = 16 * 1024 * 1024
CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
"""Seconds that a living host may take for an answer that it has at hand."""
LONGEST: Final = len("/synapse/workers/generate-1000.sock")
"""What has to fit behind a runtime directory's own path."""


def runtime_dir(args: argparse.Namespace) -> Path:
    """Return the directory of ``synapse run`` and of the verbs that talk to it: --runtime-dir, or the user's."""
    given: Path | None = args.runtime_dir
    return default_directory() if given is None else given


def default_directory() -> Path:
    """Return the user's runtime directory, or a short one in /tmp where there is none, or it is open to others or long.

    The same answer before and after a host has made it, and whatever TMPDIR says.
    """
    import platformdirs

    with warnings.catch_warnings():
        # It warns where the session has none and makes one up below TMPDIR, which differs from shell to shell.
        warnings.simplefilter("ignore")
        with suppress(OSError, RuntimeError):  # no temporary folder, or no home to make one up in
            path = platformdirs.user_runtime_path()
            if sys.platform == "win32":
                return path
            fits = len(os.fsencode(path)) + LONGEST < SUN_PATH
            if fits and path.is_absolute() and path.name != f"runtime-{os.getuid()}" and _private(path):
                return path
    return Path(f"/tmp/synapse-{os.getuid()}")  # noqa: S108 - opening it refuses another owner or an open mode


def _private(path: Path) -> bool:
    try:
        entry = path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid() and not entry.st_mode & 0o077


class Remote:
    """One connection to a running host. Make it with :func:`connect`."""

    def __init__(self, connection: socket.socket, path: Path, deadline: float | None = None) -> None:
        self._socket = connection
        self._end = None if deadline is None else time.monotonic() + deadline
        self._path = path
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, for selecting on an answer."""
        return self._socket.fileno()

    def send(self, op: str, **fields: Any) -> None:
        """Send one request; fields that are None are left out."""
        request = {"op": op, **{name: value for name, value in fields.items() if value is not None}}
        limit = _patience(op, fields)
        if self._end is not None and fields.get("deadline") is None:
            # The host isn't told: it is this end that gives up.
            left = max(0.001, self._end - time.monotonic())
            limit = left if limit is None else min(left, limit)
        self._socket.settimeout(limit)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as exc:
            raise self._gone() from exc

    def answer(self) -> dict[str, Any]:
        """Wait for the answer; a failure there is raised here as the same error."""
        parts = [self._rest]
        size = len(self._rest)
        while b"\n" not in parts[-1]:
            try:
                part = self._socket.recv(65536)
            except TimeoutError as exc:
                late = self._end is not None and time.monotonic() >= self._end
                raise DeadlineExceeded(
                    f"the deadline passed before the host on {self._path} had answered"
                    if late
                    else f"the host on {self._path} doesn't answer: it is stopped or hangs",
                    details={"stage": "control", "path": str(self._path)},
                ) from exc
            except OSError as exc:
                raise self._gone() from exc
            size += len(part)
            if not part or size > MAX_ANSWER:
                raise self._gone()
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            document: dict[str, Any] = json.loads(line)
        except ValueError as exc:
            raise self._gone() from exc
        if "error" in document:
            raise revive(document["error"])
        return document

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        self.send(op, **fields)
        return self.answer()

    def _gone(self) -> SynapseError:
        return errors.EngineCrashed(
            f"the host on {self._path} went away before it answered",
            details={"stage": "control", "cause": "eof", "path": str(self._path), "quarantined": False},
        )


@contextmanager
def connect(directory: Path, deadline: float | None = None) -> Iterator[Remote]:
    """Connect to the host that holds *directory*; InvalidRequest where none runs, or it is another user's.

    *deadline*: seconds from now after which no answer is waited for, unless a request takes its own to the host.
    """
    path = RuntimeDirectory(directory.absolute(), temporary=False).control_path
    if sys.platform == "win32":
        raise InvalidRequest("a running host is reached by a Unix socket; Windows is not supported yet")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(os.fspath(path))
        except OSError as exc:
            raise InvalidRequest(
                f"no host runs on {directory}: start it with synapse run"
                + ("" if isinstance(exc, FileNotFoundError | ConnectionRefusedError) else f" ({exc.strerror or exc})"),
                details={"reason": "no_host", "path": str(path)},
            ) from exc
        if peer_of(connection).uid != os.getuid():
            raise InvalidRequest(
                f"the host on {directory} belongs to another user; pass --runtime-dir",
                details={"reason": "foreign_host", "path": str(path)},
            )
        yield Remote(connection, path, deadline)
    finally:
        connection.close()


def _patience(op: str, fields: dict[str, Any]) -> float | None:
    """Return how long an answer may take: what the host may take itself, and then what a living one never needs."""
    limit: float | None = fields.get("deadline")
    if op in ("load", "unload", "probe") and limit is None:
        # As long as a model takes to load, or a worker to end; Ctrl-C ends the wait.
        return None
    return (limit or 0.0) + (fields.get("wait") or 0.0) + ANSWER_S


def revive(document: dict[str, Any]) -> SynapseError:
    """Return the error that a host described, with its exit code; an unknown code keeps its words."""
    code = str(document.get("code"))
    kind = _kinds().get(code, errors.WorkerError)
    error = kind(
        str(document.get("message")), details=document.get("details"), retry_after_ms=document.get("retry_after_ms")
    )
    if kind is errors.WorkerError:
        error.code = code  # type: ignore[misc]
    return error


def _kinds() -> dict[str, type[SynapseError]]:
    found: dict[str, type[SynapseError]] = {code.value: kind for code, kind in errors.WORKER_ERRORS.items()}
    own = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SynapseError))
    # Where host and worker share a code (invalid_request), the host's class has the same exit code.
    return found | {kind.code: kind for kind in own if hasattr(kind, "code") and kind is not errors.WorkerError}
