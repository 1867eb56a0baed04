"""``synapse serve``: hold a host until SIGTERM, for programs (HTTP), for people (a page) and for the other verbs."""

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
from typing import TYPE_CHECKING, Any, Final

from synapse_host.cli import host_version
from synapse_host.cli.console import Console
from synapse_host.cli.operate import busy_line, page
from synapse_host.cli.parser import Parser, UsageError, port, seconds
from synapse_host.cli.remote import runtime_dir
from synapse_host.cli.session import bundle_of, config_of, model_name
from synapse_host.errors import EXIT_INTERRUPTED, EXIT_OK, InvalidRequest
from synapse_host.host import Host
from synapse_host.models.bundles import open_installed
from synapse_host.placement.matrix import HardwareMatrix, load
from synapse_host.serve import LIBRARIES, require
from synapse_host.sync import new_event_loop

if TYPE_CHECKING:
    import socket

    from synapse_host.serve.service import Service

PORT: Final = 8765
DRAIN_S: Final = 30.0
REFRESH_S: Final = 0.1


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Hold a host with every installed model until SIGTERM or Ctrl-C. Programs reach it by HTTP as they reach\n"
        "OpenAI, Cohere, Jina or Text Embeddings Inference, and a browser shows its page; synapse embed, rerank,\n"
        "generate, ps, ping, logs, load, unload and probe use it.\n"
        "Workers start at the first request. At the end running requests are answered and waiting ones refused;\n"
        "a second signal ends at once."
    )
    parser.examples("""
        synapse serve
        synapse serve --load minilm ms-marco
        synapse serve --host 0.0.0.0 --api-key-file /etc/synapse/key
    """)
    parser.add_argument(
        "--load", nargs="+", action="extend", default=[], metavar="M", help="bundle name or folder to load at start"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to serve on (default: 127.0.0.1); one that others reach needs an API key",
    )
    parser.add_argument("--port", type=port, default=PORT, help=f"TCP port (default: {PORT}; 0: any free one)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="F",
        help="require the key in this file from everybody but this user's commands (default: env SYNAPSE_API_KEY)",
    )
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="let pages of this origin ask, as https://name"
    )
    parser.add_argument(
        "--idle", type=seconds, metavar="SECONDS", help="end a worker that has had nothing to do for so long"
    )
    parser.add_argument(
        "--drain",
        type=seconds,
        default=DRAIN_S,
        metavar="SECONDS",
        help=f"let running requests finish for this long at the end (default: {DRAIN_S:g})",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if sys.platform == "win32":
        raise InvalidRequest("synapse serve needs Unix sockets; on Windows open a Host in your own program")
    require(*LIBRARIES)
    from synapse_host.serve import listening, security

    args.runtime_dir = runtime_dir(args)
    if "SYNAPSE_LOG" not in os.environ:
        # Nobody waits for this command's answer: what goes wrong in it has to be told.
        logging.getLogger().setLevel(logging.WARNING)
    key = security.read_key(args.api_key_file)
    bound = listening.bind(args.host, args.port)
    with bound:
        if key is None and not listening.is_loopback(bound):
            raise UsageError(f"--host {args.host} needs an API key: --api-key-file or SYNAPSE_API_KEY. Others reach it")
        matrix = load(args.matrix)
        models, loads = _models(args, console)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(_Run(args, console, models, loads, bound, key).main(matrix))
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

    def __init__(
        self,
        args: argparse.Namespace,
        console: Console,
        models: dict[str, Path],
        loads: list[str],
        bound: socket.socket,
        key: bytes | None,
    ) -> None:
        self._args, self._console = args, console
        self._models, self._loads = models, loads
        self._bound, self._key = bound, key
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._interrupted = False
        self._opening: asyncio.Task[int] | None = None

    async def main(self, matrix: HardwareMatrix) -> int:
        from synapse_host.serve.application import application
        from synapse_host.serve.listening import listening
        from synapse_host.serve.security import guarded
        from synapse_host.serve.service import Service

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
            service = Service(host, about=self._about(host))
            app = guarded(application(service), key=self._key, address=self._args.host, origins=self._args.cors)
            await stack.enter_async_context(listening(app, self._bound, host.runtime))
            try:
                await self._load(host)
                if not self._stop.is_set():
                    service.ready = True
                    self._tell(service)
                    await self._stop.wait()
            finally:
                await self._drain(service)
        return EXIT_INTERRUPTED if self._interrupted else EXIT_OK

    def _about(self, host: Host) -> dict[str, Any]:
        from synapse_host.serve.listening import url_of

        return {
            "version": host_version(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "url": url_of(self._bound),
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

    async def _drain(self, service: Service) -> None:
        host = service.host
        service.stopping = True
        lanes = host.health()["lanes"].values()
        running = max(service.requests, sum(lane["state"] in ("serving", "loading") for lane in lanes))
        if running and self._stop.is_set():
            self._console.note(f"stopping: {running} running, at most {self._args.drain:g} s; a second signal ends now")
        drain = self._args.drain if self._stop.is_set() else 0.0
        closing = asyncio.ensure_future(self._close(service, drain))
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
            service.close()

    @staticmethod
    async def _close(service: Service, drain: float) -> None:
        """Let the requests of programs end, streams of many exchanges among them, then close the host."""
        loop = asyncio.get_running_loop()
        end = loop.time() + drain
        while service.requests and loop.time() < end:
            await asyncio.sleep(0.05)
        await service.host.aclose(drain=max(0.0, end - loop.time()))

    # --- start -------------------------------------------------------------------------------------------------------

    async def _load(self, host: Host) -> None:
        """Load the named models, all at once; the first that can't be loaded ends the command, a signal the loading."""
        if not self._loads:
            return
        self._opening = asyncio.current_task()
        with self._console.status() as show:
            watcher = asyncio.ensure_future(self._watch(host, show))
            try:
                await asyncio.gather(*(self._load_one(host, name) for name in self._loads))
            except asyncio.CancelledError:
                if not self._stop.is_set():
                    raise
            finally:
                self._opening = None
                watcher.cancel()

    async def _load_one(self, host: Host, name: str) -> None:
        started = time.monotonic()
        await host.load(name, deadline=self._args.deadline)
        self._console.note(f"loaded {name} in {time.monotonic() - started:.1f} s")

    async def _watch(self, host: Host, show: Callable[[str], None]) -> None:
        while True:
            show(busy_line(host.health()["lanes"]))
            await asyncio.sleep(REFRESH_S)

    def _tell(self, service: Service) -> None:
        console = self._console
        state = service.state()
        console.document(state)
        page(state, console)
        console.line()
        console.line("Stop: Ctrl-C or SIGTERM. Talk to it: synapse ps · ping · logs -f · load M · unload M")
        sys.stdout.flush()
