"""Hold a host with every installed model until SIGTERM or Ctrl-C. Programs reach it by HTTP as they reach OpenAI,
Cohere, Jina or Text Embeddings Inference, and a browser shows its page; synapse embed, rerank, generate, ps, ping,
logs, load, unload and probe use it.
Workers start at the first request. At the end running requests are answered and waiting ones refused; a second signal
ends at once.

Examples:
  synapse serve
  synapse serve --load minilm ms-marco
  synapse serve --host 0.0.0.0 --api-key-file /etc/synapse/key
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.operate import page
from synapse_host.cli.parser import Parser, UsageError, port, seconds
from synapse_host.cli.remote import runtime_dir
from synapse_host.cli.session import bundle_of, config_of, model_name, watched
from synapse_host.errors import EXIT_INTERRUPTED, EXIT_OK, InvalidRequest
from synapse_host.host import Host
from synapse_host.models.bundles import open_installed
from synapse_host.placement.interpreter import VERSION
from synapse_host.placement.matrix import HardwareMatrix, load
from synapse_host.serve import LIBRARIES, require
from synapse_host.sync import new_event_loop

if TYPE_CHECKING:
    import socket

    from synapse_host.serve.service import Service

PORT: Final = 8765
DRAIN_S: Final = 30.0


_KEY: Final = "require the key in this file from everybody but this user's commands (default: env SYNAPSE_API_KEY)"


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    load = "bundle name or folder to load at start"
    parser.option("--load", "M", load, nargs="+", action="extend", default=[])
    address = "address to serve on (default: 127.0.0.1); one that others reach needs an API key"
    parser.option("--host", "ADDRESS", address, default="127.0.0.1")
    parser.option("--port", "PORT", f"TCP port (default: {PORT}; 0: any free one)", type=port, default=PORT)
    parser.option("--api-key-file", "F", _KEY, type=Path)
    parser.option("--cors", "ORIGIN", "let pages of this origin ask, as https://name", action="append", default=[])
    parser.option("--idle", "SECONDS", "end a worker that has had nothing to do for so long", type=seconds)
    drain = f"let running requests finish for this long at the end (default: {DRAIN_S:g})"
    parser.option("--drain", "SECONDS", drain, type=seconds, default=DRAIN_S)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if sys.platform == "win32":
        raise InvalidRequest("synapse serve needs Unix sockets; on Windows open a Host in your own program")
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _leave)
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
                return runner.run(_Run(args, console, matrix, models, loads, bound, key).main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _leave(number: int, frame: object) -> None:
    """End at SIGTERM while there is nothing to drain."""
    raise SystemExit(EXIT_OK)


def _models(args: argparse.Namespace, console: Console) -> tuple[dict[str, Path], list[str]]:
    """Return every usable bundle by name, and which names to load; a broken one is left out unless it was named."""
    installed = open_installed(args.models_dir, left_out=lambda exc: console.note(f"left out: {exc.message}"))
    named = {model_name(source): bundle_of(source, args, console) for source in args.load}
    return {name: bundle.root for name, bundle in installed.items()} | named, list(named)


@dataclass
class _Run:
    """One life of the command: up, loaded, told to stop, drained."""

    args: argparse.Namespace
    console: Console
    matrix: HardwareMatrix
    models: dict[str, Path]
    loads: list[str]
    bound: socket.socket
    key: bytes | None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    forced: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: bool = False
    opening: asyncio.Task[int] | None = None
    """What the first signal cancels."""

    async def main(self) -> int:
        """Serve until a signal; return the exit code."""
        from synapse_host.serve.application import application
        from synapse_host.serve.listening import listening
        from synapse_host.serve.security import guarded
        from synapse_host.serve.service import Service

        self.opening = asyncio.current_task()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._signalled, False)
        loop.add_signal_handler(signal.SIGINT, self._signalled, True)
        config = replace(config_of(self.args), idle_unload=self.args.idle)
        async with AsyncExitStack() as stack:
            try:
                host = await stack.enter_async_context(Host.open(self.matrix, self.models, config))
            except asyncio.CancelledError:
                if self.interrupted:
                    raise
                return EXIT_OK  # SIGTERM before anything was up.
            self.opening = None
            service = Service(host, about=self._about(host))
            app = guarded(application(service), key=self.key, address=self.args.host, origins=self.args.cors)
            await stack.enter_async_context(listening(app, self.bound, host.runtime))
            try:
                await self._load(host)
                if not self.stop.is_set():
                    service.ready = True
                    self._tell(service)
                    await self.stop.wait()
            finally:
                await self._drain(service)
        return EXIT_INTERRUPTED if self.interrupted else EXIT_OK

    def _about(self, host: Host) -> dict[str, Any]:
        from synapse_host.serve.listening import url_of

        return {
            "version": VERSION,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "url": url_of(self.bound),
            "runtime_dir": str(host.runtime.path),
            "control": str(host.runtime.control_path),
            "matrix": str(host.matrix.path),
        }

    def _tell(self, service: Service) -> None:
        state = service.state()
        self.console.document(state)
        page(state, self.console)
        self.console.line()
        self.console.line("Stop: Ctrl-C or SIGTERM. Talk to it: synapse ps · ping · logs -f · load M · unload M")
        sys.stdout.flush()

    async def _load(self, host: Host) -> None:
        """Load the named models, all at once; the first that can't be loaded ends the command, a signal the loading."""
        if not self.loads:
            return
        self.opening = asyncio.current_task()
        try:
            await watched(host, self.console, asyncio.gather(*(self._load_one(host, name) for name in self.loads)))
        except asyncio.CancelledError:
            if not self.stop.is_set():
                raise
        finally:
            self.opening = None

    async def _load_one(self, host: Host, name: str) -> None:
        started = time.monotonic()
        await host.load(name, deadline=self.args.deadline)
        self.console.note(f"loaded {name} in {time.monotonic() - started:.1f} s")

    def _signalled(self, interrupt: bool) -> None:
        if self.stop.is_set():
            self.forced.set()
            return
        self.interrupted = interrupt
        self.stop.set()
        if self.opening is not None:
            self.opening.cancel()

    async def _drain(self, service: Service) -> None:
        host = service.host
        service.stopping = True
        lanes = host.health()["lanes"].values()
        running = max(service.requests, sum(lane["state"] in ("serving", "loading") for lane in lanes))
        if running and self.stop.is_set():
            self.console.note(f"stopping: {running} running, at most {self.args.drain:g} s; a second signal ends now")
        drain = self.args.drain if self.stop.is_set() else 0.0
        closing = asyncio.ensure_future(self._close(service, drain))
        forced = asyncio.ensure_future(self.forced.wait())
        try:
            await asyncio.wait({closing, forced}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                self.console.note("stopping now")
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
