"""Where workers connect: the runtime directory and one Unix socket per worker generation.

The host binds before it spawns, accepts one connection of the right process, and unlinks only what it made itself.
Nothing here imports a Unix-only module at import time; Windows connects by :mod:`synapse_host.worker.windows`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias

from synapse_host.errors import InvalidRequest, of_os
from synapse_host.locks import lock_exclusive
from synapse_host.placement import places
from synapse_host.worker import runtime_dir
from synapse_host.worker.handshake import Peer

if TYPE_CHECKING:
    from synapse_host.worker.windows import PipeListener

Listener: TypeAlias = "UnixListener | PipeListener"
"""An endpoint made for one worker, before it is spawned."""

SUN_PATH: Final = 104 if sys.platform == "darwin" else 108
"""Bytes of ``sockaddr_un.sun_path``, the final NUL included."""

_log = logging.getLogger(__name__)


class RuntimeDirectory:
    """A private directory of one host: mode 0700, ours, with an exclusive lock that names the holder's pid.

    ``RuntimeDirectory.open(None)`` makes a private temporary one that :meth:`close` removes; an explicit path is
    created if missing, stays, and can be held by one host at a time.
    """

    def __init__(self, path: Path, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self.workers = path / "synapse" / "workers"
        self._lock: IO[bytes] | None = None
        self._short: RuntimeDirectory | None = None
        self._made: dict[Path, tuple[int, int]] = {}
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path | str | None = None) -> RuntimeDirectory:
        """Return a usable directory. InvalidRequest says why not: another owner, too open a mode, held by whom."""
        if path is None:
            # A living host holds its lock.
            for killed in [killed for root in runtime_dir.roots() for killed in runtime_dir.sweep(root)]:
                _log.info("a killed host's directory was removed: path=%s", killed)
        folder = places.temporary() if path is None else Path(path).resolve()
        directory = None
        try:
            made = Path(tempfile.mkdtemp(prefix=runtime_dir.PREFIX, dir=folder)) if path is None else folder
            directory = cls(made, temporary=path is None)
            directory._make()
        except BaseException as exc:
            if directory is not None:
                directory.close()
            if not isinstance(exc, OSError):
                raise
            what, cure = "can't be the runtime directory", "choose another one"
            if path is None:
                what, cure = "takes no runtime directory", "set TMPDIR to another folder"
            details = {"reason": "runtime_dir", "path": str(folder)}
            text = f"{folder} {what}: {exc.strerror or exc}; {cure}"
            raise of_os(exc, text, otherwise=InvalidRequest, details=details) from exc
        return directory

    def _make(self) -> None:
        """Make what is missing of the directory, check that it is ours alone, and take its lock."""
        # `parents=True` would make them with the umask's mode, and whoever may write above us may replace us.
        missing = [part for part in self.path.parents if not part.exists()]
        for part in reversed(missing):
            part.mkdir(mode=0o700, exist_ok=True)
        for part in (self.path, self.path / "synapse", self.workers):
            part.mkdir(mode=0o700, exist_ok=True)
            _check_private(part)
        lock = self.path / runtime_dir.LOCK
        if not _is_file(self._lock, lock):
            # 0600 whatever the umask: whoever may write the lock file may lie about its holder.
            taken = _take_lock(lock, private=self.temporary)
            if self._lock is not None:
                self._lock.close()
            self._lock = taken

    def socket_path(self, worker_id: str) -> Path:
        """Return where the worker *worker_id* will connect.

        ``workers/<worker_id>.sock``; where that is too long for a socket address, or taken by another lane of this
        host, a short hashed name, if need be in a short directory of our own.
        """
        path = self.workers / f"{safe_id(worker_id)}.sock"
        if _fits(path) and path not in self._made:
            return path
        digest = hashlib.sha256(f"{os.getpid()}\0{worker_id}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        path = self.workers / f"wk-{digest}.sock"
        if _fits(path):
            return path
        if self._short is None:
            # TMPDIR alone takes 49 bytes on macOS; /tmp is short on every Unix.
            self._short = RuntimeDirectory(
                Path(tempfile.mkdtemp(prefix=runtime_dir.PREFIX, dir="/tmp")), temporary=True
            )
            self._short._make()
        return self._short.path / f"wk-{digest}.sock"

    @property
    def control_path(self) -> Path:
        """Where a long-running host listens for its operator."""
        return self.path / "synapse" / "control.sock"

    def listen(self, worker_id: str) -> UnixListener:
        """Bind and listen for one worker. InvalidRequest when the path is taken by something that isn't ours."""
        try:
            return self._bind(self.socket_path(worker_id))
        except FileNotFoundError:
            # Cleaners of /tmp remove what lay there for days; the lane would be lost until the host restarts.
            _log.warning("the runtime directory was removed and is made again: path=%s", self.path)
            if self._short is not None and not self._short.path.exists():
                self._short.close()
                self._short = None
            self._made = {path: made for path, made in self._made.items() if path.exists()}
            self._make()
            return self._bind(self.socket_path(worker_id))

    def listen_control(self) -> UnixListener:
        """Bind and listen for operators, in place of a dead host's socket. InvalidRequest as for :meth:`listen`."""
        if not _fits(self.control_path):
            what = f"is too long for a socket ({SUN_PATH - 1} bytes fit); choose a shorter runtime directory"
            raise _unusable(self.control_path, "runtime_dir", what)
        return self._bind(self.control_path)

    def _bind(self, path: Path) -> UnixListener:
        _clear_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(8)
            entry = path.lstat()
        except BaseException:
            listener.close()
            raise
        self._made[path] = (entry.st_dev, entry.st_ino)
        return UnixListener(listener, path, self._unlink)

    def close(self) -> None:
        """Remove what is ours and give the lock back; idempotent. A forked child's copy removes nothing."""
        if os.getpid() != self._pid:
            return
        for path in list(self._made):
            self._unlink(path)
        if self._short is not None:
            self._short.close()
            self._short = None
        if self._lock is not None:
            # The file stays: unlinking a lock file lets two holders lock two files of the same name.
            self._lock.close()
            self._lock = None
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def _unlink(self, path: Path) -> None:
        made = self._made.pop(path, None)
        with suppress(OSError):
            entry = path.lstat()
            if made == (entry.st_dev, entry.st_ino):
                path.unlink()


class UnixListener:
    """One bound socket, for one worker."""

    def __init__(self, listener: socket.socket, path: Path, unlink: Callable[[Path], None]) -> None:
        self.listening = listener
        self._unlink = unlink
        self.path = path

    @property
    def arguments(self) -> tuple[str, str]:
        """The worker's arguments: ``--socket PATH``."""
        return ("--socket", os.fspath(self.path))

    async def connect(self, protocol: asyncio.BaseProtocol, admit: Callable[[Peer], bool]) -> None:
        """Give *protocol* the first connection whose process *admit* takes; others before it are closed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self.listening)
            except ConnectionAbortedError:
                continue
            try:
                peer = peer_of(connection)
                if admit(peer):
                    self.close()
                    await loop.connect_accepted_socket(lambda: protocol, connection)
                    return
            except BaseException:
                connection.close()
                raise
            connection.close()
            _log.warning("a foreign process connected and was turned away: socket=%s peer=%s", self.path.name, peer)

    def close(self) -> None:
        """Stop listening and remove the socket file, if it still is ours; idempotent."""
        self.listening.close()
        self._unlink(self.path)


def safe_id(lane_id: str) -> str:
    """Return *lane_id* as part of a file name: unsafe characters become ``_``, so does a leading dot."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", lane_id)
    return "_" + name[1:] if name.startswith(".") else name


def peer_of(connection: socket.socket) -> Peer:
    """Return uid and pid of the process at the other end, as far as the platform knows."""
    if sys.platform == "linux":
        pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(uid, pid)
    elif sys.platform == "darwin":
        # <sys/un.h>: SOL_LOCAL 0, LOCAL_PEERCRED 1 (struct xucred: version, uid, ...), LOCAL_PEERPID 2. Not measured.
        _version, uid = struct.unpack_from("=II", connection.getsockopt(0, 1, 76))
        (pid,) = struct.unpack("=i", connection.getsockopt(0, 2, 4))
        return Peer(uid, pid)
    else:
        return Peer(None, None)


def _unusable(path: Path, reason: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path} {what}", details={"reason": reason, "path": str(path)})


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) < SUN_PATH


def _is_file(handle: IO[bytes] | None, path: Path) -> bool:
    """Tell whether *handle* is the file that others would open as *path*."""
    try:
        return handle is not None and os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except OSError:
        return False


def _take_lock(path: Path, *, private: bool) -> IO[bytes]:
    """Lock the file *path* and write into it whose it is; InvalidRequest names who holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
    handle = os.fdopen(os.open(path, flags, 0o600), "a+b")
    try:
        lock_exclusive(handle)
    except OSError as exc:
        pid, whom = runtime_dir.holder(handle)
        handle.close()
        directory = path.parents[1]
        raise InvalidRequest(
            f"runtime directory {directory} is in use by {whom}.",
            details={"reason": "runtime_dir_busy", "path": str(directory), "pid": pid},
            advice={
                "python": "Stop it or set another HostConfig.runtime_dir.",
                "command": "Stop it or pass another --runtime-dir.",
            },
        ) from exc
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n".encode() + (runtime_dir.PRIVATE if private else b""))
    handle.flush()
    return handle


def _check_private(path: Path) -> None:
    """Refuse a directory that isn't ours alone: whoever can write there can pose as a worker."""
    if os.name != "posix":
        return
    entry = path.lstat()
    if not stat.S_ISDIR(entry.st_mode):
        raise _unusable(path, "runtime_dir", "is not a directory")
    if entry.st_uid != os.geteuid():
        what = f"belongs to uid {entry.st_uid}, not to this user; choose another runtime directory"
        raise _unusable(path, "runtime_dir_owner", what)
    if entry.st_mode & 0o077:
        what = f"is open to others (mode {stat.S_IMODE(entry.st_mode):04o}); choose another runtime directory, or if "
        raise _unusable(path, "runtime_dir_mode", f"{what}nothing else uses it: chmod 700 {path}")


def _clear_stale(path: Path) -> None:
    """Make *path* free: remove a dead socket; refuse a live listener and anything that isn't a socket."""
    try:
        entry = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(entry.st_mode):
        raise _unusable(path, "path_taken", "is in the way and is not a socket; move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError:
            # EAGAIN: a listener with a full backlog is a live one.
            pass
    raise _unusable(path, "path_taken", "is taken, another process listens: stop it or take another runtime directory")
