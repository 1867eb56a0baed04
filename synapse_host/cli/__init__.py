"""The ``synapse`` command: one file a verb, found through one table.

:func:`main` fills closed standard streams, finds the verb, parses its arguments and reports how it ended: as a line on
stderr, or as a document under ``--json``, and as an exit code. A verb's module offers a docstring, which its help
prints, ``configure(parser)``, which adds arguments, and ``run(args, console)``, which returns the exit code or raises a
SynapseError.
Only the chosen verb's module is imported, so that ``synapse --help`` costs nothing but argparse. The common options
(``--json``, ``--quiet``, ``--matrix``, ``--models-dir``, ``--runtime-dir``, ``--deadline``) are added here. From the
moment a verb runs SIGINT, SIGTERM and SIGHUP end it in order, by KeyboardInterrupt in the main thread.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

from synapse_host.cli.console import Console, printable
from synapse_host.cli.parser import Parser, UsageError, common_options, nearest
from synapse_host.errors import EXIT_FAILED, EXIT_OK, BundleInvalid, InvalidRequest, SynapseError, of_os
from synapse_host.placement.interpreter import VERSION


class Verb(NamedTuple):
    """What the page of verbs says about one, and the module of this package where it lives, if not that of its name."""

    summary: str
    group: str
    module: str | None = None


VERBS: Final[dict[str, Verb]] = {
    "embed": Verb("vectors of texts, in input order", "work"),
    "rerank": Verb("score documents against a query", "work"),
    "search": Verb("the nearest texts of an embedded corpus", "work"),
    "generate": Verb("continue a prompt, or answer a chat message", "work"),
    "serve": Verb("hold a host until SIGTERM: an HTTP API, a page, and the verbs below", "host"),
    "ps": Verb("lanes and workers of the running host", "host", "operate"),
    "ping": Verb("do its workers answer?", "host", "operate"),
    "logs": Verb("what its workers wrote; -f follows", "host", "operate"),
    "load": Verb("load a model there", "host", "operate"),
    "unload": Verb("unload a model there and forget its lane's strikes", "host", "operate"),
    "probe": Verb("prove a shut lane there with a fresh worker, and open it", "host", "operate"),
    "build": Verb("make a model bundle from a checkpoint", "models"),
    "models": Verb("list, find, verify and install model bundles", "models"),
    "matrix": Verb("check hw_matrix.yaml; explain why a lane got its engine", "machine"),
    "doctor": Verb("what this machine can run, what is wrong, and the line that fixes it", "machine"),
    "certify": Verb("does a lane give the right numbers here, and run where it should", "machine"),
    "certificates": Verb("what is certified here, how old, and what voids it", "machine", "certify"),
    "bench": Verb("measure it all, beside rivals where they are installed", "machine"),
    "demo": Verb("embed, rerank, generate, and kill a worker on purpose", "machine"),
}
"""A verb is listed here when it works."""

ALIASES: Final = {"run": "serve"}
"""Former names, which go on working."""

_LIMITED: Final = {"build", "models", "matrix", "doctor", "certify", "certificates", "demo"}
"""Verbs whose --deadline bounds the whole command; the others hand it to the requests they make."""

_GROUPS: Final = {"work": "Work", "host": "A running host", "models": "Models", "machine": "This machine"}


def _page() -> str:
    lines = [
        "synapse: local inference that survives its engines.",
        "",
        "  synapse embed 'a text' 'another'            vectors, 384 numbers each",
        "  synapse rerank 'a question' 'doc' 'doc'     which document answers it",
        "  synapse doctor                              what this machine can run",
    ]
    for key, title in _GROUPS.items():
        lines += ["", title]
        lines += [f"  {name:<10} {verb.summary}" for name, verb in VERBS.items() if verb.group == key]
    lines += [
        "",
        "Every verb: --help with examples, --json (one document on stdout), --quiet, --matrix FILE, --models-dir DIR,",
        "--runtime-dir DIR, --deadline SECONDS. Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 lane",
        "quarantined or refused, 4 hardware or engine missing, 5 deadline exceeded, 130 interrupted.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. No exception leaves here, and no traceback is shown to a user."""
    _open_standard_streams()
    _heed_children()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The flags are looked up by hand, before anything is parsed: a usage error under --json is a document too.
    head = arguments[: arguments.index("--")] if "--" in arguments else arguments
    console = Console(json="--json" in head, quiet="--quiet" in head)
    try:
        code = _run(arguments, console)
        sys.stdout.flush()
        if argv is None:
            _leave(code)
        return code
    except OSError as exc:
        # The reader went away (`synapse embed … | head`), or its disk is full: nowhere to say more on stdout.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - stdout's own flush at exit must not fail again
        if not isinstance(exc, BrokenPipeError):
            with suppress(OSError):
                print(f"synapse: the result can't be written: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_FAILED


def _leave(code: int) -> NoReturn:
    """End the process at once: all is written, and the workers are stopped and reaped.

    An orderly end takes every library apart for nobody, and where a thread is still inside the tokenizer's, aborts.
    """
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str], console: Console) -> int:
    """Run a command and report how it failed; OSError is left only for output that can't be written."""
    try:
        return _dispatch(arguments, console)
    except SynapseError as exc:
        return console.fail(exc)
    except KeyboardInterrupt:
        return console.interrupted()
    except BrokenPipeError:
        raise
    except OSError as exc:
        return console.fail(_of_the_system(exc))
    except BaseException as exc:  # the process boundary: a bug of ours still gets one line and an exit code
        if any(isinstance(each, KeyboardInterrupt) for each in _chain(exc)):
            # Whatever it met on its way became an exception of its own.
            return console.interrupted()
        from engines.bundle.manifest import BundleError

        if isinstance(exc, BundleError):
            return console.fail(BundleInvalid(str(exc)))
        if any(_NO_THREAD.search(str(each)) for each in _chain(exc)):
            return console.fail(_no_threads(exc))
        # A panic of a Rust library is no Exception, and no reason for a traceback either; SystemExit is argparse's.
        if os.environ.get("SYNAPSE_DEBUG") or isinstance(exc, SystemExit | GeneratorExit):
            raise
        return console.bug(exc)


def _of_the_system(exc: OSError) -> SynapseError:
    """Return the error of a failed system call: its place, its reason, and what to do where that isn't plain."""
    if exc.errno == errno.EAGAIN:
        return _no_threads(exc)
    place = f"{exc.filename}: " if exc.filename else ""
    if exc.errno == errno.ENOSPC:
        place = place or "what the command writes can't be written: "
    if not place:
        try:
            os.getcwd()  # noqa: PTH109 - Path.cwd would be the same call
        except OSError:
            place = "the current folder is gone: "
    return of_os(exc, f"{place}{exc.strerror or exc}", otherwise=InvalidRequest)


_NO_THREAD: Final = re.compile(r"can't start new thread|ThreadPoolBuildError|thread pool has not been initialized")


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it comes from."""
    seen: BaseException | None = exc
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _no_threads(exc: BaseException) -> SynapseError:
    return InvalidRequest(
        "the system starts no further thread or process for this user: raise the limit (ulimit -u, or the container's "
        "--pids-limit), or end other programs",
        details={"reason": "no_threads", "cause": str(exc)[:200]},
    )


def _open_standard_streams() -> None:
    """Fill closed standard descriptors with the null device, and let no character stop a command's words.

    A file or socket that got number 1 or 2 would be written into by whoever prints (``synapse … >&-``).
    """
    for number, flag in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one: those below are open by now.
            os.open(os.devnull, flag)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model writes any character; a terminal or pipe of another encoding shows the rest escaped.
        sys.stdout.reconfigure(errors="backslashreplace")


def _heed_children() -> None:
    """Let the kernel keep the exit statuses of our children, also where whoever started us ignored SIGCHLD.

    Ignoring is inherited: a killed worker's status would be lost, and a failed tool would look as if it had succeeded.
    """
    number = getattr(signal, "SIGCHLD", None)
    in_main = threading.current_thread() is threading.main_thread()
    if number is not None and in_main and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


def _dispatch(arguments: list[str], console: Console) -> int:
    if len(arguments) > 1 and arguments[0] == "help" and not arguments[1].startswith("-"):
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_page())
        return EXIT_OK
    if arguments[0] in ("-V", "--version"):
        print(f"synapse {VERSION}")
        return EXIT_OK
    name = ALIASES.get(arguments[0], arguments[0])
    verb = VERBS.get(name)
    if verb is None:
        raise UsageError(f"no verb {name!r}{nearest(name, VERBS)}. See them all: synapse --help")
    module = import_module(f"synapse_host.cli.{verb.module or name}")
    parser = Parser(f"synapse {name}", module.__doc__)
    module.configure(parser)
    common_options(parser)
    try:
        args = parser.read(arguments[1:])
    except SystemExit as exc:  # --help only: errors raise UsageError
        return int(exc.code or 0)
    args.verb, args.started = name, time.monotonic()
    _configure_logging()
    with _interruptible(), ExitStack() as stack:
        if name in _LIMITED and args.deadline is not None:
            from synapse_host.cli.session import limited

            stack.enter_context(limited(args, f"synapse {name} ran"))
        code: int = module.run(args, console)
        return code


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end the block in order, as Ctrl-C does; ignored ones stay so."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if callable(signal.getsignal(signal.SIGINT)):
            # From here on there is something to end; `synapse_host.__main__` left at once before.
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if before.get(signal.SIGINT, signal.default_int_handler) is not signal.default_int_handler:
            before[signal.SIGINT] = signal.SIG_IGN  # `synapse_host.__main__`'s answer: it is said once
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _configure_logging() -> None:
    """Logs go to stderr. A command says itself what it has to say: logs show only where SYNAPSE_LOG asks (info …)."""
    import logging

    class Printable(logging.Formatter):
        """Escape what steers a terminal: records quote what workers wrote."""

        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record))

    level = logging.getLevelName(os.environ.get("SYNAPSE_LOG", "critical").upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level if isinstance(level, int) else logging.CRITICAL, handlers=[handler])
