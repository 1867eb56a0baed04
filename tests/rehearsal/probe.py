"""One bundle through the CUDA lane in this process, on the stub libraries: prints one JSON document.

``python -m tests.rehearsal.probe MANIFEST`` reads ``[steps, config]`` as JSON from stdin; config is LOAD's
runtime_config. A step is ``["load"]`` (first, unless it is named elsewhere), ``["request", rows, name]`` (rows of token
ids), ``["fault", function, skip, times, code, stays]``, ``["heal"]`` or ``["close"]``. The garbage collector is off, so
what only it would free counts as left.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import manifest
from engines.cuda.engine import CudaEngine
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.support.owned_bundle import load_request
from tests.support.rows import batch_of

runtime = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)


def report() -> dict[str, Any]:
    """Return what the stubs counted since the last call, and what is alive."""
    with tempfile.NamedTemporaryFile() as file:
        runtime.cudashim_report(file.name.encode())
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
    runtime.cudashim_reset()
    return found


def watch(sessions: list[dict[str, Any]]) -> None:
    """Note of every session where its nodes went and how many copies between devices were put into its graph."""
    import onnxruntime as ort

    original = ort.InferenceSession

    class Watched(original):  # type: ignore[misc, valid-type]
        def __init__(self, model: bytes, options: Any, providers: Any, **keywords: Any) -> None:
            row: dict[str, Any] = {"options": dict(providers[0][1])}
            sessions.append(row)
            options.log_severity_level = 0
            with tempfile.TemporaryFile() as log:
                saved = os.dup(2)
                os.dup2(log.fileno(), 2)
                try:
                    super().__init__(model, options, providers, **keywords)
                finally:
                    os.dup2(saved, 2)
                    os.close(saved)
                log.seek(0)
                text = log.read().decode(errors="replace")
            row["memcpy"] = sum(int(n) for n in re.findall(r"(\d+) Memcpy nodes? (?:is|are) added", text))
            row["nodes"] = Counter()
            for part in self.get_provider_graph_assignment_info():
                row["nodes"][part.ep_name] += len(part.get_nodes())

    ort.InferenceSession = Watched


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Run *call*; return how it ended and what it cost."""
    result: dict[str, Any] = {"ok": True}
    try:
        value = call()
        if isinstance(value, np.ndarray):
            result["shape"] = list(value.shape)
    except Exception as exc:  # whatever it is, the tests judge it
        code = getattr(getattr(exc, "code", None), "value", "")
        result = {"ok": False, "type": type(exc).__name__, "code": code, "text": str(exc)[:600]}
    return result | {"stats": report()}


def main(path: str, steps: list[list[Any]], config: dict[str, str]) -> dict[str, Any]:
    gc.disable()
    bundle = manifest.read(Path(path))
    engine = CudaEngine(WorkerOptions(device="cuda", manifest=bundle.root / manifest.FILE_NAME))
    result: dict[str, Any] = {"floor": engine.probe_floor().code, "sessions": [], "steps": {}}
    watch(result["sessions"])
    loaded: list[Any] = []
    for kind, *rest in steps if ["load"] in steps else [["load"], *steps]:
        if kind == "load":
            request = load_request(bundle, **config)
            result["steps"]["load"] = attempt(lambda r=request: loaded.append(engine.load(r, progress=silent())))
        elif kind == "fault":
            function, skip, times, code, stays = rest
            runtime.cudashim_fault(function.encode(), ctypes.c_long(skip), ctypes.c_long(times), code, stays)
        elif kind == "heal":
            runtime.cudashim_heal()
        elif kind == "close":
            result["steps"]["close"] = attempt(lambda: loaded.pop().close() if loaded else None)
        else:
            rows, name = rest
            result["steps"][name] = attempt(lambda rows=rows: loaded[0].forward(batch_of(rows), silent()))
    result["left"] = report()
    return result


if __name__ == "__main__":
    document = main(sys.argv[1], *json.load(sys.stdin))
    print(json.dumps(document), flush=True)
    os._exit(0)  # after a fault nothing more may be asked of onnxruntime
