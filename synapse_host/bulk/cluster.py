"""The embedding of a corpus on several machines, by Ray: parts of parquet, each made exactly once.

The theory of operation. The driver cuts the corpus into blocks and asks Ray for one actor, which says what the model is
and where it runs; with that the blocks have their keys (:mod:`synapse_host.bulk.parts`), and those whose part is there
already are left out. Ray hands the others to its actors, restarts dead ones and runs their block again: nothing of that
is done here. An actor holds one host (:class:`~synapse_host.sync.SyncHost`), which supervises its worker on that
machine; a block that runs twice writes the same part twice. In the end every block's part is looked for, and
``manifest.json`` and ``errors.jsonl`` are written from what the parts say. A run refuses a folder with parts that it
wouldn't make itself (of another model, precision, policy or corpus), and an actor on a machine that would compute other
numbers refuses its work.

For those who have a Ray program already, :class:`Embedder` is a callable class for ``map_batches``::

    ds.map_batches(Embedder, fn_constructor_kwargs={"model": "minilm"}, concurrency=2, num_cpus=2)
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Final

from synapse_host.bulk import parts
from synapse_host.bulk.actors import AGAIN, Embedder, PartWriter, check_same
from synapse_host.bulk.embedding import Display
from synapse_host.bulk.entries import Policy
from synapse_host.bulk.parts import Block
from synapse_host.errors import BackendMissing, EngineCrashed, InvalidRequest, SynapseError, revive
from synapse_host.placement import places

__all__ = ["Embedder", "embed_on_ray"]

LINE_EVERY_S: Final = 60.0
REACH_S: Final = 10.0
READERS: Final = 16
"""Parts whose facts are read at a time: in a bucket each one takes a round trip or two."""


def embed_on_ray(
    source: str,
    out: str,
    model: str,
    *,
    policy: Policy | None = None,
    column: str = "text",
    address: str | None = None,
    display: Display,
    interactive: bool = False,
    block_bytes: int = parts.BLOCK_BYTES,
    **embedder: Any,
) -> dict[str, Any]:
    """Embed *source* (a file, a folder or a pattern, by path or URI) into parts in the folder *out*; blocks until done.

    *address*: Ray's (``auto``: the running cluster); None starts Ray on this machine. *embedder*: as
    :class:`Embedder`'s ``lane``, ``engine``, ``matrix``, ``models_dir``, ``require_certificate``. A run with the same
    corpus, model and policy goes on where the last one stopped. Returns the command's document. Raises BackendMissing
    without Ray, InvalidRequest where *out* holds the parts of another result, and the first error that stops an actor.
    """
    ray, policy = _ray(), policy or Policy()
    # An actor's working directory is another one.
    source, out = _absolute(source), _absolute(out)
    embedder |= {name: _absolute(embedder[name]) for name in ("matrix", "models_dir") if embedder.get(name)}
    embedder["model"] = _absolute(model) if os.sep in model else model
    arguments = {"truncate": policy.truncate, "dimensions": policy.dimensions, **embedder}
    target, folder = parts.filesystem(out)
    blocks = parts.find_blocks(source, block_bytes=block_bytes, leave=folder)
    found = parts.list_parts(target, folder)
    started = time.monotonic()
    with _connected(ray, address):
        placed = _placement(ray, arguments)
        # A part without a bad row is the same whatever becomes of bad rows: a run that one stopped goes on with skip.
        shaping = {name: value for name, value in policy.facts().items() if name != "on_error"}
        # As JSON has them: compared with what parts say.
        common = json.loads(json.dumps({"policy": shaping, "column": column}))
        common |= {name: placed[name] for name in ("manifest_digest", "dtype")}
        names = {posixpath.basename(path) for path in found}
        mine = {posixpath.basename(parts.part_path(folder, block, common)): block for block in blocks}
        for path in sorted(names - set(mine)):
            _refuse(target, posixpath.join(folder, path), common)
        todo = [block for name, block in mine.items() if name not in names]
        if len(todo) < len(blocks):
            display.note(f"going on: {len(blocks) - len(todo)} of {len(blocks)} parts are there")
        if todo:
            described_blocks = _with_lines(ray, source, blocks, todo)
            writer = (source, out, common, policy, arguments)
            _run(ray, placed, described_blocks, writer, None if interactive else display)
    document = _finish(target, folder, blocks, common, placed)
    elapsed = max(time.monotonic() - started, 1e-9)
    return {
        "model": placed["model"],
        "dims": placed["dims"],
        "n": document["n"],
        "skipped": document["skipped"],
        "parts": len(document["parts"]),
        "made": len(todo),
        "out": out,
        "texts_per_s": sum(part["rows"] for part in document["parts"] if part["part"] not in names) / elapsed,
    }


def _absolute(where: str) -> str:
    # Not Path.absolute: that keeps "..".
    return where if "://" in where else os.path.abspath(places.expanded(where))  # noqa: PTH100


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise BackendMissing(
            "Ray is missing. Install it: pip install 'synapse-workers[ray]'", details={"missing": "ray"}
        ) from exc
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Have Ray for the block: the program's own, or the one at *address*, or one on this machine that ends with it."""
    if ray.is_initialized():
        yield
        return
    try:
        if address is not None and (found := re.fullmatch(r"\[?([^/\]]+)\]?:(\d{1,5})", address)):
            # Ray itself tries for a quarter of an hour.
            socket.create_connection((found[1], int(found[2])), REACH_S).close()
        # "local": without it Ray looks for one that runs here, of whomever.
        options = {"include_dashboard": False} if address is None else {}
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[:1] or [type(exc).__name__]
        raise InvalidRequest(
            f"Ray can't be reached at {address or 'this machine'}: {reason[0]}", details={"address": address}
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def _placement(ray: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what an actor's machine makes of the model: Embedder.facts() of one that is started for it."""

    def ask() -> dict[str, Any]:
        try:
            with closing(Embedder(**arguments)) as embedder:
                return embedder.facts()
        except SynapseError as exc:
            return {"error": exc.to_dict()}

    # Where there are GPUs the machine that has one is asked: the head of such a cluster has none.
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    facts = dict(ray.get(ray.remote(ask).options(num_cpus=1, num_gpus=gpus).remote()))
    if "error" in facts:
        raise revive(facts["error"])
    return facts


def _with_lines(ray: Any, source: str, blocks: list[Block], todo: list[Block]) -> list[str]:
    """Return the blocks to do as JSON, each with the number of its file's lines before it; Ray counts them."""
    cut = {block.file for block in todo if block.suffix in parts.LINE_FILES and block.first}
    counted = [block for block in blocks if block.file in cut]

    def count(block: Block) -> int:
        files, _ = parts.filesystem(parts.base_of(source))
        return parts.count_lines(files, block)

    counting = ray.remote(count)
    before: dict[Block, int] = {}
    totals: Counter[str] = Counter()
    for block, lines in zip(counted, ray.get([counting.remote(block) for block in counted]), strict=True):
        before[block] = totals[block.file]
        totals[block.file] += lines
    return [json.dumps({"block": asdict(block), "before": before.get(block, 0)}) for block in todo]


def _run(ray: Any, placed: dict[str, Any], blocks: list[str], writer: tuple[Any, ...], display: Display | None) -> None:
    """Have Ray make the parts of *blocks*, by actors that are made with the arguments *writer*.

    Ray restarts actors and runs their blocks again by itself. *display* gets a line a minute; None: Ray shows its bar.
    """
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = display is None
    # The other one needs tqdm, and shows nothing without it.
    context.enable_rich_progress_bars, context.use_ray_tqdm = True, False
    # A worker's death under an actor is not one of the actor, and the host doesn't retry: the block is asked for again.
    context.actor_task_retry_on_errors = list(AGAIN)
    gpus = 1 if placed["device"].startswith("cuda") else 0
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # No more than a machine has: such an actor would be waited for without end.
    cpus = min(max(1, placed["threads"]), max(int(machine.get("CPU", 1)) for machine in machines))
    most = sum(int(machine.get("GPU", 0) if gpus else machine.get("CPU", 0) // cpus) for machine in machines)
    done = rows = 0
    telling = (
        nullcontext()
        if display is None
        else _each_minute(lambda: display.note(f"{done} of {len(blocks)} parts, {rows} texts"))
    )
    try:
        with ray.data.DataContext.current(context), telling:
            items = [{"block": block} for block in blocks]
            data = ray.data.from_items(items, override_num_blocks=len(blocks)).map_batches(
                PartWriter,
                fn_constructor_args=writer,
                batch_size=1,
                num_cpus=cpus,
                num_gpus=gpus,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, min(most, len(blocks)))),
            )
            for row in data.iter_rows():
                done, rows = done + 1, rows + row["rows"]
                if (error := json.loads(row["error"])) is not None:
                    raise revive(error)
    except ray.exceptions.RayError as exc:
        message = str(exc).strip().splitlines()
        raise EngineCrashed(
            f"Ray ended the job: {message[-1] if message else exc!r}", details={"cause": "ray"}
        ) from exc


@contextmanager
def _each_minute(tell: Callable[[], None]) -> Iterator[None]:
    """Call *tell* every LINE_EVERY_S seconds while the block runs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(LINE_EVERY_S):
            tell()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _refuse(files: Any, path: str, common: dict[str, Any]) -> None:
    """Raise InvalidRequest for a part in the folder that this run wouldn't make."""
    facts = parts.part_facts(files, path) or {}
    check_same(common, facts, path)
    of = facts.get("block", {}).get("file", "?")
    raise InvalidRequest(
        f"{path} is of {of} as it was, or of another corpus: who reads the folder would have its rows too. "
        "Take another folder, or remove what is there",
        details={"what": path, "differs": ["corpus"]},
    )


def _finish(
    files: Any, folder: str, blocks: list[Block], common: dict[str, Any], placed: dict[str, Any]
) -> dict[str, Any]:
    """Check that every block has its part, and write the manifest and the list of errors from what the parts say."""
    made: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    paths = [parts.part_path(folder, block, common) for block in blocks]
    with ThreadPoolExecutor(READERS) as pool:
        said = pool.map(lambda path: parts.part_facts(files, path), paths)
        for block, path, facts in zip(blocks, paths, said, strict=True):
            if facts is None:
                raise InvalidRequest(f"{path}: the part of {block.file} is gone. Run it again")
            check_same(common, facts, path)
            errors += facts["errors"]
            kept = {name: facts.get(name) for name in ("rows", "engine", "kernel_revision")}
            made.append({"part": posixpath.basename(path), "file": block.file, **kept})
    parts.sweep(files, folder)
    counts = {"n": sum(part["rows"] for part in made), "skipped": len(errors)}
    document = {"model": placed["model"], "dims": placed["dims"], **common, **counts, "parts": made}
    parts.write_text(files, posixpath.join(folder, parts.MANIFEST), json.dumps(document, indent=1))
    if errors:
        lines = (json.dumps({name: entry[name] for name in ("where", "code", "message")}) + "\n" for entry in errors)
        parts.write_text(files, posixpath.join(folder, "errors.jsonl"), "".join(lines))
    return document
