"""The command line of every worker: ``--socket``/``--pipe`` to serve, ``--version`` and ``--probe-floor`` alone.

Exit codes: 0 done (SHUTDOWN, or the host closed between two frames; ``--probe-floor`` says ok) · 1 the stream or the
device can't be trusted, or a bug (traceback on stderr) · 2 usage, or ``--probe-floor`` refuses · 130 interrupted.

stdout carries the one line of ``--version`` or ``--probe-floor`` and nothing else, ever: file descriptor 1 points to
stderr from the start, so a native library's own printing can't break that either.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from engines.protocol.errors import EngineError, RemoteProtocolError
from engines.protocol.messages import VERSION
from engines.runtime.engine import Engine, EngineIdentity, WorkerOptions, own_version
from engines.runtime.transport import HANDSHAKE_S, PeerGone, Transport, TransportFailed, connect_socket
from engines.runtime.worker import DeviceLostExit, Worker

EngineFactory: TypeAlias = Callable[[WorkerOptions], Engine]
PR_SET_PDEATHSIG: Final = 1


def parser(program: str, default_device: str) -> argparse.ArgumentParser:
    """Return the parser of a worker's command line (interfaces.md, Workers)."""
    result = argparse.ArgumentParser(
        prog=program,
        description="Inference worker, started by the host. Alone: --version or --probe-floor.",
        allow_abbrev=False,
    )
    where = result.add_mutually_exclusive_group()
    where.add_argument("--socket", metavar="PATH", help="the host's Unix socket")
    where.add_argument("--pipe", metavar="NAME", help="the host's named pipe (Windows)")
    where.add_argument("--version", action="store_true", help="print one line and exit")
    where.add_argument("--probe-floor", action="store_true", help="print one JSON line: can this machine run it?")
    result.add_argument("--nonce", metavar="HEX16", type=_nonce, help="the spawn's 16 lowercase hex digits")
    result.add_argument("--device", default=default_device, type=_device, help="cpu, cuda[:N], metal or ane")
    result.add_argument("--manifest", metavar="PATH", type=Path, help="the bundle's manifest.json (owned workers)")
    result.add_argument("--packed", metavar="W,W", type=_widths, help="packed widths the host qualifies")
    return result


def _nonce(text: str) -> str:
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError("must be 16 lowercase hex digits")
    return text


def _device(text: str) -> str:
    kind, colon, index = text.partition(":")
    if kind not in ("cpu", "cuda", "metal", "ane") or (colon and (kind != "cuda" or not index.isdecimal())):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda, cuda:N, metal or ane")
    return text


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths such as 256,384")
    return widths


def run(
    factory: EngineFactory,
    argv: Sequence[str] | None = None,
    *,
    program: str,
    default_device: str = "cpu",
    worker: type[Worker] = Worker,
) -> int:
    """Run one worker process; return its exit status, or end the process with it once it has served.

    *factory* makes the engine from the options; it must not import a native library (HELLO comes first).
    """
    stdout = _claim_stdout()
    if hasattr(signal, "SIGCHLD"):
        with contextlib.suppress(ValueError):  # not the main thread
            # Ignoring it is inherited, and a probe's child that was killed would look as if it had ended well.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        arguments = parser(program, default_device).parse_args(argv)
        options = WorkerOptions(device=arguments.device, manifest=arguments.manifest, packed=arguments.packed)
        if arguments.version:
            _line(stdout, version_line(program, identify(factory(options), options)))
            return 0
        if arguments.probe_floor:
            probe = factory(options).probe_floor()
            _line(stdout, msgspec.json.encode(probe).decode())
            return 0 if probe.status == "ok" else 2
        if arguments.nonce is None or (arguments.socket is None and arguments.pipe is None):
            print(
                f"{program}: the host starts workers with --socket PATH (or --pipe NAME) and --nonce HEX16; "
                "alone: --version, --probe-floor",
                file=sys.stderr,
            )
            return 2
    finally:
        with contextlib.suppress(OSError):
            os.close(stdout)
    status = _guarded(program, lambda: serve(factory, options, arguments, worker))
    # The models are closed. Taking the interpreter and every library apart as well would take 30 ms more, for nobody.
    sys.stderr.flush()
    os._exit(status)


def _guarded(program: str, body: Callable[[], None], leave: Callable[[int], object] = os._exit) -> int:
    """Run *body*; expected ends become an exit status and one line. Anything else is a bug and keeps its traceback.

    *leave* ends the process at once, without destructors: a native library that still holds models may abort in them,
    after a lost device or, on Metal, whenever a model was never freed, and the abort would hide the status.
    """
    try:
        body()
        return 0
    except PeerGone:
        return 0
    except KeyboardInterrupt:
        status = 130
    except (RemoteProtocolError, TransportFailed, DeviceLostExit, EngineError) as exc:
        print(f"{program}: fatal: {exc}", file=sys.stderr, flush=True)
        status = 1
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        leave(1)
        raise
    leave(status)
    return status


def serve(
    factory: EngineFactory, options: WorkerOptions, arguments: argparse.Namespace, kind: type[Worker] = Worker
) -> None:
    """Connect, shake hands and serve until the end."""
    deadline = time.monotonic() + HANDSHAKE_S
    # First of all: until we have connected no socket can show by its end that the host has gone.
    die_with_parent()
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        # The host asks a silent worker for its stacks before it kills it (protocol-v3, 5).
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    engine = factory(options)
    identity = identify(engine, options)
    worker = kind(connect(arguments.socket, arguments.pipe, deadline=deadline), engine, identity)
    with contextlib.closing(worker.channel):
        worker.greet(arguments.nonce)
        # The host is checking HELLO now: a good moment for what isn't needed earlier.
        configure_logging()
        if worker.await_ack(deadline=deadline):
            worker.serve()


def connect(socket_path: str | None, pipe_name: str | None, *, deadline: float) -> Transport:
    """Connect to the host. Raises TransportFailed."""
    if pipe_name is not None:
        if os.name != "nt":
            raise TransportFailed("--pipe is for Windows; use --socket")
        from engines.runtime.pipe import connect_pipe

        return connect_pipe(pipe_name, deadline=deadline)
    assert socket_path is not None
    return connect_socket(socket_path)


def identify(engine: Engine, options: WorkerOptions) -> EngineIdentity:
    """Return the engine's identity with the device echoed, as the host compares it with the matrix."""
    identity = engine.identity()
    if "device" in identity.build_flags:
        return identity
    return msgspec.structs.replace(identity, build_flags={**identity.build_flags, "device": options.device})


def version_line(program: str, identity: EngineIdentity) -> str:
    """Return ``--version``'s line: program, the distribution's version, then key=value pairs."""
    pairs = {
        "protocol": str(VERSION),
        "engine": identity.engine,
        "engine_version": identity.version,
        **identity.build_flags,
        "kernel_revision": identity.kernel_revision,
        "manifest_digest": identity.manifest_digest,
    }
    return " ".join([program, own_version(), *(f"{key}={value}" for key, value in pairs.items() if value is not None)])


def die_with_parent() -> None:
    """Ask Linux to kill us when our parent dies. The socket's end says the same; this covers a stuck process too."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def configure_logging() -> None:
    """Send the log to stderr, where the host tags and keeps it."""
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


def _claim_stdout() -> int:
    """Return a descriptor of the real stdout and point descriptor 1 at stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    return stdout


def _line(descriptor: int, text: str) -> None:
    data = text.replace("\n", " ").encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
