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
from typing import TYPE_CHECKING, Any, Final

from synapse_host import errors
from synapse_host.errors import DeadlineExceeded, InvalidRequest, SynapseError
from synapse_host.serve import require
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory, peer_of

if TYPE_CHECKING:
    import httpx

BASE: Final = "http://localhost"
"""What a request over the Unix socket calls the server; only its path matters."""
CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
"""Seconds that a living host may take for an answer that it has at hand."""
LONGEST: Final = len("/synapse/workers/generate-1000.sock")
"""What has to fit behind a runtime directory's own path."""


def runtime_dir(args: argparse.Namespace) -> Path:
    """Return the directory of ``synapse serve`` and of the verbs that talk to it: --runtime-dir, or the user's."""
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
    """A running host, asked by HTTP over its Unix socket. Make it with :func:`connect`."""

    def __init__(self, client: httpx.Client, path: Path, deadline: float | None = None) -> None:
        self._client = client
        self._end = None if deadline is None else time.monotonic() + deadline
        self._path = path

    def get(self, route: str) -> dict[str, Any]:
        """Return the document of a route."""
        document: dict[str, Any] = self._ask("GET", route, {}).json()
        return document

    def text(self, route: str) -> str:
        """Return the text of a route."""
        return self._ask("GET", route, {}).text

    def post(self, route: str, **fields: Any) -> dict[str, Any]:
        """Send one request and return its answer; fields that are None are left out. A failure there is raised here.

        *timeout*: the deadline that the host itself keeps.
        """
        document: dict[str, Any] = self._ask("POST", route, fields).json()
        return document

    def _ask(self, method: str, route: str, fields: dict[str, Any]) -> httpx.Response:
        import httpx

        limit = patience(route, fields)
        if self._end is not None and fields.get("timeout") is None:
            # The host isn't told: it is this end that gives up.
            left = max(0.001, self._end - time.monotonic())
            limit = left if limit is None else min(left, limit)
        body = {name: value for name, value in fields.items() if value is not None}
        try:
            answer = self._client.request(method, route, content=packed(body), timeout=limit)
        except httpx.TimeoutException as exc:
            raise late(self._path, passed=self._end is not None and time.monotonic() >= self._end) from exc
        except httpx.HTTPError as exc:
            raise gone(self._path) from exc
        return checked(answer, self._path)


def packed(body: dict[str, Any]) -> bytes:
    """Return a request's body in ASCII: what a user types may hold half a surrogate pair, which UTF-8 can't."""
    return json.dumps(body).encode()


def checked(answer: httpx.Response, path: Path) -> httpx.Response:
    """Return an answer that is good; raise the error that another one holds."""
    if answer.is_success:
        return answer
    try:
        raise errors.revive(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        raise gone(path) from None


def late(path: Path, *, passed: bool) -> SynapseError:
    """Return the error of an answer that didn't come in time; *passed*: the command's own deadline did."""
    return DeadlineExceeded(
        f"the deadline passed before the host on {path} had answered"
        if passed
        else f"the host on {path} doesn't answer: it is stopped or hangs",
        details={"stage": "control", "path": str(path)},
    )


def gone(path: Path) -> SynapseError:
    """Return the error of a host that ended before it answered."""
    return errors.EngineCrashed(
        f"the host on {path} went away before it answered",
        details={"stage": "control", "cause": "eof", "path": str(path), "quarantined": False},
    )


@contextmanager
def connect(directory: Path, deadline: float | None = None) -> Iterator[Remote]:
    """Reach the host that holds *directory*; InvalidRequest where none runs, or it is another user's.

    *deadline*: seconds from now after which no answer is waited for, unless a request takes its own to the host.
    """
    path = reachable(directory)
    require("httpx")
    import httpx

    transport = httpx.HTTPTransport(uds=os.fspath(path))
    with httpx.Client(transport=transport, base_url=BASE, trust_env=False) as client:
        yield Remote(client, path, deadline)


def reachable(directory: Path) -> Path:
    """Return the socket of the host that holds *directory*; InvalidRequest where none takes connections there."""
    path = RuntimeDirectory(directory.absolute(), temporary=False).control_path
    if sys.platform == "win32":
        raise InvalidRequest("a running host is reached by a Unix socket; Windows is not supported yet")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as exc:
            raise InvalidRequest(
                f"no host runs on {directory}: start it with synapse serve"
                + ("" if isinstance(exc, FileNotFoundError | ConnectionRefusedError) else f" ({exc.strerror or exc})"),
                details={"reason": "no_host", "path": str(path)},
            ) from exc
        if peer_of(probe).uid != os.getuid():
            raise InvalidRequest(
                f"the host on {directory} belongs to another user; pass --runtime-dir",
                details={"reason": "foreign_host", "path": str(path)},
            )
    return path


def patience(route: str, fields: dict[str, Any]) -> float | None:
    """Return how long an answer may take: what the host may take itself, and then what a living one never needs."""
    limit: float | None = fields.get("timeout")
    if route.rpartition("/")[2] in ("load", "unload", "probe") and limit is None:
        # As long as a model takes to load, or a worker to end; Ctrl-C ends the wait.
        return None
    return (limit or 0.0) + (fields.get("wait") or 0.0) + ANSWER_S
