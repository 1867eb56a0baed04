"""A client that never reads holds a server's connection no longer than its limit, and never its end."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from synapse_host.serve import clients
from synapse_host.serve.clients import Clients

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="Unix sockets")

LARGE = b"x" * 16 * 1024 * 1024
"""More than any socket's buffer takes."""


@pytest.mark.parametrize("end", ["well", "late", "cut"])
def test_a_client_that_does_not_read(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block ended well (the last answer is unread), ran into its own limit, or the server ends."""
    monkeypatch.setattr(clients, "FLUSH_S", 0.1)

    async def main() -> None:
        served, connected = Clients(), asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with served.connected(writer):
                writer.write(LARGE)
                connected.set()
                if end != "well":
                    async with asyncio.timeout(0.1 if end == "late" else None):
                        await writer.drain()

        server = await asyncio.start_unix_server(accept, tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(tmp_path / "s"))
            async with asyncio.timeout(20):
                await connected.wait()
                assert len(served) == 1
                if end == "cut":
                    await served.end()
                while len(served):
                    await asyncio.sleep(0.01)
                server.close()
                await server.wait_closed()
                # Nothing of it is left: no task, no descriptor that the loop watches.
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_client_that_reads_late_gets_its_answer_whole(tmp_path: Path) -> None:
    async def main() -> None:
        served = Clients()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with served.connected(writer):
                writer.write(LARGE)

        async with await asyncio.start_unix_server(accept, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                assert len(await reader.read(-1)) == len(LARGE)
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())
