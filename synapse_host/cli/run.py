"""``synapse run``: hold a host until SIGTERM, for the verbs that talk to it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from synapse_host.cli import host_version
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, port, seconds
from synapse_host.cli.ps import loading_line, page
from synapse_host.cli.remote import runtime_dir
from synapse_host.cli.session import bundle_of, config_of, model_name
from synapse_host.errors import EXIT_INTERRUPTED, EXIT_OK, InvalidRequest
from synapse_host.host import Host
from synapse_host.models.bundles import open_installed
from synapse_host.placement.matrix import HardwareMatrix, load
from synapse_host.serve import metrics
from synapse_host.serve.control import ControlServer
from synapse_host.sync import new_event_loop

DRAIN_S: Final = 30.0
REFRESH_S: Final = 0.1


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Hold a host with every installed model until SIGTERM or Ctrl-C, reached by: synapse ps, ping, logs, load and\n"
        "unload. Workers start at the first load. At the end running requests are answered and waiting ones refused;\n"
        "a second signal ends at once."
    )
    parser.examples("""
        synapse run
        synapse run --load minilm ms-marco
        synapse run --load minilm --metrics 9464 --runtime-dir ~/.synapse-run
    """)
    parser.add_argument(
        "--load", nargs="+", action="extend", default=[], metavar="M", help="bundle name or folder to load at start"
    )
    parser.add_argument("--metrics", type=port, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")
    parser.add_argument(
        "--idle", type=seconds, metavar="SECONDS", help="end a worker that has had nothing to do for so long"
    )
    parser.add_argument(
        "--drain", type=seconds, default=DRAIN_S, metavar="SECONDS",
        help=f"let running requests finish for this long at the end (default: {DRAIN_S:g})",
    )  # fmt: skip


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if sys.platform == "win32":
        raise InvalidRequest("synapse run needs Unix sockets; on Windows open a Host in your own program")
    if args.metrics is not None:
        metrics.require()
    args.runtime_dir = runtime_dir(args)
    if "SYNAPSE_LOG" not in os.environ:
        # Nobody waits for this command's answer: what goes wrong in it has to be told.
        logging.getLogger().setLevel(logging.WARNING)
    matrix = load(args.matrix)
    models, loads = _models(args, console)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_Run(args, console, models, loads).main(matrix))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _models(args: argparse.Namespace, console: Console) -> tuple[dict[str, Path], list[str]]:
    """Return every usable bundle by name, and which names to load; a broken one is left out unless it was named."""
    installed = open_installed(args.models_dir, left_out=lambda exc: console.note(f"left out: {exc.message}"))
    models = {name: bundle.root for name, bundle in installed.items()}
    loads: list[str] = []
    for source in args.load:
        name = model_name(source)
        models[name] = bundle_of(source, args, console)
        if name not in loads:
            loads.append(name)
    return models, loads


class _Run:
    """One life of the command: up, loaded, told to stop, drained."""

    def __init__(self, args: argparse.Namespace, console: Console, models: dict[str, Path], loads: list[str]) -> None:
        self._args = args
        self._console = console
        self._models = models
        self._loads = loads
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._interrupted = False
        self._opening: asyncio.Task[int] | None = None

    async def main(self, matrix: HardwareMatrix) -> int:
        self._listen_to_signals()
        config = replace(config_of(self._args), idle_unload=self._args.idle)
        async with AsyncExitStack() as stack:
            try:
                host = await stack.enter_async_context(Host.open(matrix, self._models, config))
            except asyncio.CancelledError:
                if self._interrupted:
                    raise
                return EXIT_OK  # SIGTERM before anything was up.
            self._opening = None
            control = await stack.enter_async_context(ControlServer.open(host, about=self._about(host)))
            url = None
            if self._args.metrics is not None:
                url = (await stack.enter_async_context(metrics.MetricsServer.open(host, self._args.metrics))).url
            try:
                await self._until_stopped(self._load(host))
                if not self._stop.is_set():
                    self._tell(control, url)
                    await self._stop.wait()
            finally:
                await self._drain(host, control)
        return EXIT_INTERRUPTED if self._interrupted else EXIT_OK

    def _about(self, host: Host) -> dict[str, Any]:
        return {
            "version": host_version(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "runtime_dir": str(host.runtime.path),
            "control": str(host.runtime.control_path),
            "matrix": str(host.matrix.path),
        }

    # --- signals -----------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        self._opening = asyncio.current_task()
        loop.add_signal_handler(signal.SIGTERM, self._signalled, False)
        loop.add_signal_handler(signal.SIGINT, self._signalled, True)

    def _signalled(self, interrupt: bool) -> None:
        if self._stop.is_set():
            self._forced.set()
            return
        self._interrupted = interrupt
        self._stop.set()
        if self._opening is not None:
            self._opening.cancel()

    async def _until_stopped(self, work: Any) -> None:
        """Await *work*, or give it up when told to stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _drain(self, host: Host, control: ControlServer) -> None:
        control.stopping = True
        lanes = host.health()["lanes"].values()
        running = sum(lane["state"] in ("serving", "loading") for lane in lanes)
        if running and self._stop.is_set():
            self._console.note(f"stopping: {running} running, at most {self._args.drain:g} s; a second signal ends now")
        drain = self._args.drain if self._stop.is_set() else 0.0
        closing = asyncio.ensure_future(host.aclose(drain=drain))
        forced = asyncio.ensure_future(self._forced.wait())
        try:
            await asyncio.wait({closing, forced}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                self._console.note("stopping now")
                await host.aclose(drain=0.0)
            await closing
        finally:
            forced.cancel()
            await asyncio.gather(forced, return_exceptions=True)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _load(self, host: Host) -> None:
        """Load the named models, all at once; the first that can't be loaded ends the command."""
        if not self._loads:
            return
        with self._console.status() as show:
            watcher = asyncio.ensure_future(self._watch(host, show))
            jobs = [asyncio.ensure_future(self._load_one(host, name)) for name in self._loads]
            try:
                await asyncio.gather(*jobs)
            finally:
                for task in (watcher, *jobs):
                    task.cancel()
                await asyncio.gather(watcher, *jobs, return_exceptions=True)

    async def _load_one(self, host: Host, name: str) -> None:
        started = time.monotonic()
        await host.load(name, deadline=self._args.deadline)
        self._console.note(f"loaded {name} in {time.monotonic() - started:.1f} s")

    async def _watch(self, host: Host, show: Callable[[str], None]) -> None:
        while True:
            show(loading_line(host.health()["lanes"]))
            await asyncio.sleep(REFRESH_S)

    def _tell(self, control: ControlServer, url: str | None) -> None:
        console = self._console
        state = control.state()
        if url is not None:
            state["host"]["metrics"] = control.about["metrics"] = url
        console.document(state)
        page(state, console)
        console.line()
        console.line("Stop: Ctrl-C or SIGTERM. Talk to it: synapse ps · ping · logs -f · load M · unload M")
        sys.stdout.flush()
