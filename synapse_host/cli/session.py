"""From a command line to an open host: configuration, which bundles, and the private runtime directory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from synapse_host.cli.console import Console
from synapse_host.cli.operate import busy_line
from synapse_host.cli.parser import Parser
from synapse_host.cli.running import find
from synapse_host.config import HostConfig
from synapse_host.errors import DeadlineExceeded
from synapse_host.models import catalogue
from synapse_host.placement.matrix import HardwareMatrix
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.placement.select import lane_with

if TYPE_CHECKING:
    from synapse_host.host import Host
    from synapse_host.results import EmbedResult, Generation, RerankResult

DEFAULT_MODELS: Final = {"embed": "minilm", "rerank": "ms-marco", "generate": "smollm2"}

OWN_HOST: Final = (
    "The running server of this user (synapse serve) is used where it has the model. Otherwise, and with --local, the\n"
    "command starts a host and a worker of its own and stops them at the end."
)
"""What the help of a one-shot verb says about where it runs."""

READING: Final = "the input was read"
"""What :func:`limited` says of a deadline that passed while a command read what it was given."""

PATIENCE_S: Final = 0.7
REFRESH_S: Final = 0.2
HURRY_S: Final = 10.0
"""Seconds after which another Ctrl-C interrupts the end of a command too."""

T = TypeVar("T")


def serving_options(parser: Parser, task: str) -> None:
    """Add --model and --lane of a verb that serves *task*, and say where it runs."""
    model = DEFAULT_MODELS[task]
    parser.option("--model", "M", f"bundle name or folder (default: {model})", default=model)
    lane_options(parser, task)
    parser.description = f"{parser.description}\n{OWN_HOST}"


def lane_options(parser: Parser, task: str) -> None:
    """Add --lane and --engine of a verb that serves *task*."""
    parser.option("--lane", "L", f"lane of the matrix (default: {task})")
    parser.flag("--local", help="use a host of the command's own, not the running server")
    parser.option("--engine", "E", "this engine of the lane instead of the first that fits")
    parser.set_defaults(task=task)


def served_by(result: EmbedResult | RerankResult | Generation) -> dict[str, Any]:
    """Return what a document says of a result's maker."""
    return {"model": result.model, "lane": result.lane, "engine": result.engine, "device": result.device}


def config_of(args: argparse.Namespace) -> HostConfig:
    """Return the host's configuration; without --runtime-dir the directory is private and removed at the end."""
    strict = getattr(args, "require_certificate", False)
    return HostConfig(runtime_dir=args.runtime_dir, models_dir=args.models_dir, require_certificate=strict)


def bundle_of(name: str, args: argparse.Namespace, console: Console) -> Path:
    """Return a bundle's folder: a path, or a name in the models directory; a default model is made on first use."""
    path = catalogue.locate(name, args.models_dir)
    if path is None and name in catalogue.DEFAULTS:
        console.note(f"{name} is not installed yet; making its bundle once (later starts are offline and instant)")
    with console.stages(name) as progress, limited(args, f"the bundle of {name} was made"):
        return catalogue.obtain(name, args.models_dir, progress=progress).root


def run_host(
    args: argparse.Namespace, console: Console, models: dict[str, str], work: Callable[[Host], Awaitable[T]]
) -> T:
    """Run *work* with the running server where it has *models* (name to bundle name or path), else with a host of ours.

    Everything that can be refused without a worker is refused first: the matrix, then the bundles.
    """
    running = find(args, models, console)
    if running is not None:

        async def ask() -> T:
            async with running.open() as host:
                return await work(cast("Host", host))  # it has what the one-shot verbs call

        return run_orderly(ask())
    matrix: HardwareMatrix = load_matrix(args.matrix)
    config = config_of(args)
    if args.engine is not None:
        # Without --lane this chooses the lane as well.
        args.lane = args.lane or lane_with(matrix, args.task, args.engine)
        config = replace(config, engines={args.lane: args.engine})
    paths = {name: bundle_of(source, args, console) for name, source in models.items()}

    async def body() -> T:
        from synapse_host.host import Host

        async with Host.open(matrix, paths, config) as host:
            if len(paths) > 1:
                return await work(host)
            starting = host.load(*paths, lane=args.lane)  # the deadline is the work's
            return await _beside(starting, work(host))

    return run_orderly(body())


async def _beside(starting: Awaitable[None], work: Awaitable[T]) -> T:
    """Return what *work* gives, while the worker that it needs starts: opening the tokenizer takes as long.

    A failed start is the command's failure: work that came to it later would start another worker. Work that is done
    first didn't need one: it has no text, or none but empty ones.
    """
    tasks = asyncio.ensure_future(starting), asyncio.ensure_future(work)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
        return await tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_orderly(work: Coroutine[Any, Any, T]) -> T:
    """Run *work* so that Ctrl-C, SIGTERM or a lost terminal end it in order; KeyboardInterrupt after any of them."""

    async def body() -> T:
        with _ending_in_order():
            return await work

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def watched(host: Host, console: Console, work: Awaitable[T]) -> T:
    """Await *work*; when it takes long a line on the terminal tells what the lanes have finished."""
    task = asyncio.ensure_future(work)
    try:
        # A quick answer shows nothing, and doesn't pay for importing what shows it.
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not task.done() and console.bars:
            with console.status() as show:
                while not task.done():
                    show(busy_line(host.health()["lanes"]))
                    await asyncio.wait({task}, timeout=REFRESH_S)
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def left(args: argparse.Namespace) -> float | None:
    """Return the seconds that remain of --deadline, which counts from the verb's start: input and start-up included."""
    if args.deadline is None:
        return None
    end: float = args.started + args.deadline
    return max(0.001, end - time.monotonic())


@contextlib.contextmanager
def limited(args: argparse.Namespace, what: str) -> Iterator[None]:
    """End the block when --deadline passes as Ctrl-C would, with DeadlineExceeded: "the deadline passed while *what*".

    For work that has no deadline of its own. One block inside another changes nothing; Windows has no such timer.
    """
    seconds = left(args)
    possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not possible or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    end = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # inside: a tiny deadline rings before this returns
        yield
    except KeyboardInterrupt:
        if time.monotonic() < end:
            raise
        raise DeadlineExceeded(f"the deadline of {args.deadline:g} s passed while {what}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Cancel the current task at the first signal, or :func:`limited`'s alarm.

    Workers are stopped and the private runtime directory is removed then: a matter of seconds, in which impatient
    further signals change nothing; after HURRY_S they cancel again.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    first: list[float] = []

    def stop() -> None:
        if not first or loop.time() - first[0] > HURRY_S:
            first.append(loop.time())
            task.cancel()

    handled = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM"):
        number = getattr(signal, name, None)
        before = None if number is None else signal.getsignal(number)
        # Ignored ones stay so: nohup, or a shell's background job.
        if number is not None and before is not signal.SIG_IGN:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, stop)
                handled[number] = before
    try:
        yield
    finally:
        for number, before in handled.items():
            loop.remove_signal_handler(number)
            # asyncio leaves the default: an alarm would end the process without a word.
            signal.signal(number, before)


def model_name(source: str) -> str:
    """Return how messages call a model that was given by name or path."""
    return Path(source).name or source
