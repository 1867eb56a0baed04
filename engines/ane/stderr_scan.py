"""Core ML's failures that appear on stderr only.

A load can succeed though the Neural Engine's compiler failed; the first prediction then kills the process
(apple/coremltools#2758). So file descriptor 2 is watched while a function is opened and first run: everything is passed
on at once (the host's log keeps it even if the process dies), and known lines turn the load into a refusal.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Final

from engines.protocol.errors import EngineError, ErrorCode

FAILED: Final = re.compile(rb"E5RT|ANECCompile|ANE(Compil|Program)\w* fail|Program load failure|Espresso.*rror")
EXHAUSTED: Final = re.compile(rb"Program load failure|no memory|resource\w* exhaust", re.IGNORECASE)
KEEP: Final = 64 * 1024


class StderrScan:
    """Context manager; :meth:`check` after the block raises when a known line was written to stderr meanwhile."""

    def __init__(self) -> None:
        self._tail = bytearray()

    def __enter__(self) -> StderrScan:
        self._saved = os.dup(2)
        self._read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._forward, name="stderr-scan", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._saved, 2)  # closes the pipe's last writer, so the thread meets EOF
        self._thread.join()
        os.close(self._read)
        os.close(self._saved)

    def _forward(self) -> None:
        while data := os.read(self._read, 65536):
            os.write(self._saved, data)
            self._tail += data
            del self._tail[:-KEEP]

    def check(self, what: str, *, placement: bool = True) -> None:
        """Raise EngineError for the first known line: ``ane_resources_exhausted`` or ``invalid_placement``.

        With *placement* False a failed compiler is passed over: the function runs elsewhere, and that isn't judged.
        """
        for line in bytes(self._tail).splitlines():
            if FAILED.search(line):
                text = line.decode("utf-8", "replace").strip()[:300]
                if EXHAUSTED.search(line):
                    raise EngineError(ErrorCode.ANE_RESOURCES_EXHAUSTED, f"{what}: {text}")
                if placement:
                    why = f"{what}: the Neural Engine's compiler failed: {text}"
                    raise EngineError(ErrorCode.INVALID_PLACEMENT, why)
