"""The embedding of a corpus on several machines, by Ray: parts of parquet, each made exactly once.

The theory of operation. The driver cuts the corpus into blocks and asks Ray for one actor, which says what the model is
and where it runs; with that the blocks have their keys (:mod:`synapse_host.bulk.parts`), and those whose part is there
already are left out. Ray hands the others to its actors, restarts dead ones and runs their block again: nothing of that
is done here. An actor holds one host (:class:`~synapse_host.sync.SyncHost`), which supervises its worker on that
machine; a block that runs twice writes the same part twice. In the end every block's part is looked for, and
``manifest.json`` and ``errors.jsonl`` are written from what the parts say. A run refuses to add to the parts of another
model, precision or policy, and an actor on a machine that would compute other numbers refuses its work.

For those who have a Ray program already, :class:`Embedder` is a callable class for ``map_batches``::

    ds.map_batches(Embedder, fn_constructor_kwargs={"model": "minilm"}, concurrency=2, num_cpus=2)
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from synapse_host.bulk import parts
from synapse_host.bulk.embedding import Display, Job, Policy, described
from synapse_host.bulk.output import Left
from synapse_host.bulk.parts import Block
from synapse_host.config import HostConfig
from synapse_host.errors import BackendMissing, EngineCrashed, InvalidRequest, QueueFull, SynapseError, revive
from synapse_host.models import catalogue
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.placement.select import lane_with
from synapse_host.sync import SyncHost
from synapse_host.text.validate import width

if TYPE_CHECKING:
    import numpy as np

    from synapse_host.host import Host

SAME: Final = ("manifest_digest", "dtype", "policy", "column")
"""What all parts of one result agree in."""
AGAIN: Final = (EngineCrashed, QueueFull)
"""Errors of a block that may be embedded again."""
LINE_EVERY_S: Final = 60.0


class Embedder:
    """Adds ``vector`` and ``truncated`` to batches with a column of texts; for ``ray.data.Dataset.map_batches``.

    *model*: a bundle's name, or its folder on a path that all machines share; a default model is installed where it
    is missing. *column*: where the texts are. *truncate*: cut what is too long (else SequenceTooLong). *prompt* and
    *dimensions*: as :meth:`synapse_host.host.Host.embed`. Errors keep their codes. The host ends with the actor.
    """

    def __init__(
        self,
        model: str,
        *,
        column: str = "text",
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
        lane: str | None = None,
        engine: str | None = None,
        matrix: str | None = None,
        models_dir: str | None = None,
        require_certificate: bool = False,
    ) -> None:
        self._column = column
        self._truncate = truncate
        self._prompt = prompt
        self._dimensions = dimensions
        loaded = load_matrix(matrix)
        self.lane = lane if lane or not engine else lane_with(loaded, "embed", engine)
        folder = None if models_dir is None else Path(models_dir)
        self.bundle = catalogue.obtain(model, folder)
        self.model = Path(model).name
        config = HostConfig(
            models_dir=folder,
            require_certificate=require_certificate,
            engines={self.lane or "embed": engine} if engine else {},
        )
        self._open = ExitStack()
        self.host = self._open.enter_context(SyncHost.open(loaded, {self.model: self.bundle.root}, config))

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Embed one batch: columns as arrays in, the same ones with ``vector`` float32 (n, dims) out."""
        import numpy as np

        texts = [str(text) for text in batch[self._column]]
        options: dict[str, Any] = {"lane": self.lane, "truncate": self._truncate, "prompt": self._prompt}
        result = self.host.embed_result(self.model, texts, dimensions=self._dimensions, **options)
        cut = np.zeros(len(texts), bool)
        cut[result.truncated] = True
        return {**batch, "vector": result.vectors, "truncated": cut}

    def facts(self) -> dict[str, Any]:
        """Return what makes the vectors: model, digest, precision, engine; and the CPU threads that its lane takes."""
        spec = self.host.lane_of(self.model, self.lane).require()
        dtypes = {item.digest: item.dtype for item in self.bundle.manifest.artifacts}
        return {
            "model": self.model,
            "manifest_digest": self.bundle.digest,
            "dtype": dtypes.get(spec.load.artifact_digest),
            "dims": width(self.bundle.manifest, self._dimensions),
            "engine": spec.engine_id,
            "device": spec.device,
            "threads": int(spec.load.runtime_config.get("threads", "1")),
        }

    def kernel_revision(self) -> str | None:
        """Return what the worker says of its kernels once it runs."""
        lanes: dict[str, Any] = self.host.health()["lanes"]
        revision: str | None = lanes[self.host.lane_of(self.model, self.lane).lane_id].get("kernel_revision")
        return revision

    def close(self) -> None:
        """End the host and its worker."""
        self._open.close()


class PartWriter:
    """What an actor of the command does: reads a block, embeds it and writes its part."""

    def __init__(self, source: str, out: str, common: dict[str, Any], policy: Policy, embedder: dict[str, Any]) -> None:
        self._embedder = Embedder(**embedder)
        self._facts = {**common, **self._embedder.facts()}
        _check_same(common, self._facts, "this machine's engine")
        self._common = common
        self._policy = policy
        self._source, _ = parts.filesystem(parts.base_of(source))
        self._files, self._out = parts.filesystem(out)
        self._tokenizer = policy.tokenizer(self._embedder.bundle, self._embedder.model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Make the parts of a batch of blocks (``block``: JSON texts); return how many rows each has.

        An error of ours is returned in ``error``, as JSON: Ray would only keep its text. Raised are those after which
        Ray runs the block again: a worker died under it. A second death in a row shuts the lane, and ends the job.
        """
        rows, errors = [], []
        for text in batch["block"]:
            error = None
            try:
                rows.append(self._part(**json.loads(str(text))))
            except SynapseError as exc:
                if isinstance(exc, AGAIN) and not exc.details.get("quarantined"):
                    raise
                rows.append(0)
                error = exc.to_dict()
            errors.append(json.dumps(error))
        return {"rows": rows, "error": errors}

    def _part(self, block: dict[str, Any], before: int) -> int:
        piece = Block(**block)
        path = parts.part_path(self._out, piece, self._common)
        if (made := parts.part_facts(self._files, path)) is not None:
            return int(made["rows"])
        file = parts.PartFile(self._files, path, self._facts["dims"])
        try:
            facts = self._embedder.host.call(lambda host: self._write(host, file, piece, before))
            file.end({**self._facts, **facts, "kernel_revision": self._embedder.kernel_revision()})
        except BaseException:
            file.drop()
            raise
        return int(facts["rows"])

    async def _write(self, host: Host, file: parts.PartFile, block: Block, before: int) -> dict[str, Any]:
        """Embed a block into *file*; return what its part says of the rows."""
        errors: list[Left] = []
        skip = self._policy.on_error == "skip"

        def note(error: SynapseError) -> None:
            errors.append(described(error))

        on_bad = note if skip else None
        texts = parts.block_texts(self._source, block, self._common["column"], before, on_bad)
        entries = self._policy.entries(texts, self._tokenizer, on_bad)
        rows = 0
        async for made in Job(host, self._embedder.model, self._embedder.lane, None, self._policy).blocks(entries):
            file.write([text.id for text in made.kept], made.joined(), made.truncated)
            errors += made.skipped
            rows += len(made.kept)
        return {"block": asdict(block), "rows": rows, "errors": to_builtins(errors)}


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
    ray = _ray()
    policy = policy or Policy()
    blocks = parts.find_blocks(source, block_bytes=block_bytes)
    target, folder = parts.filesystem(out)
    found = parts.list_parts(target, folder)
    started = time.monotonic()
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        arguments = {"model": model, "truncate": policy.truncate, "dimensions": policy.dimensions, **embedder}
        placed = _placement(ray, arguments)
        # As JSON has them: compared with what parts say.
        common = json.loads(json.dumps({"policy": policy.facts(), "column": column}))
        common |= {name: placed[name] for name in ("manifest_digest", "dtype")}
        for path in found:
            _check_same(common, parts.part_facts(target, path) or {}, path)
        names = {posixpath.basename(path) for path in found}
        todo = [block for block in blocks if posixpath.basename(parts.part_path(folder, block, common)) not in names]
        if len(todo) < len(blocks):
            display.note(f"going on: {len(blocks) - len(todo)} of {len(blocks)} parts are there")
        if todo:
            described_blocks = _with_lines(ray, source, blocks, todo)
            writer = (source, out, common, policy, arguments)
            _run(ray, placed, described_blocks, writer, None if interactive else display)
    finally:
        if ours:
            ray.shutdown()
    document = _finish(target, folder, blocks, common)
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


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise BackendMissing(
            "Ray is missing. Install it: pip install 'synapse-workers[ray]'", details={"missing": "ray"}
        ) from exc
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    return ray


def _placement(ray: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what an actor's machine makes of the model: Embedder.facts() of one that is started for it."""

    def ask() -> dict[str, Any]:
        try:
            embedder = Embedder(**arguments)
        except SynapseError as exc:
            return {"error": exc.to_dict()}
        try:
            return embedder.facts()
        except SynapseError as exc:
            return {"error": exc.to_dict()}
        finally:
            embedder.close()

    facts = dict(ray.get(ray.remote(ask).options(num_cpus=1).remote()))
    if "error" in facts:
        raise revive(facts["error"])
    return facts


def _with_lines(ray: Any, source: str, blocks: list[Block], todo: list[Block]) -> list[str]:
    """Return the blocks to do as JSON, each with the number of its file's lines before it; Ray counts them."""
    cut = {block.file for block in todo if block.suffix in parts.LINE_FILES and block.first}
    counted = [block for block in blocks if block.file in cut]

    def count(row: dict[str, Any]) -> dict[str, Any]:
        files, _ = parts.filesystem(parts.base_of(source))
        return {"at": row["at"], "lines": parts.count_lines(files, Block(**json.loads(row["block"])))}

    lines: dict[int, int] = {}
    if counted:
        items = [{"at": at, "block": json.dumps(asdict(block))} for at, block in enumerate(counted)]
        lines = {row["at"]: row["lines"] for row in ray.data.from_items(items).map(count).iter_rows()}
    before: dict[tuple[str, int], int] = {}
    totals: dict[str, int] = {}
    for at, block in enumerate(counted):
        before[block.file, block.first] = totals.get(block.file, 0)
        totals[block.file] = before[block.file, block.first] + lines[at]
    return [json.dumps({"block": asdict(block), "before": before.get((block.file, block.first), 0)}) for block in todo]


def _run(ray: Any, placed: dict[str, Any], blocks: list[str], writer: tuple[Any, ...], display: Display | None) -> None:
    """Have Ray make the parts of *blocks*, by actors that are made with the arguments *writer*.

    Ray restarts actors and runs their blocks again by itself. *display* gets a line a minute; None: Ray shows its bar.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = display is None
    # A worker's death under an actor is not one of the actor, and the host doesn't retry: the block is asked for again.
    context.actor_task_retry_on_errors = list(AGAIN)
    gpus = 1 if placed["device"].startswith("cuda") else 0
    cpus = max(1, placed["threads"])
    most = max(1, int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)) // (gpus or cpus))
    data = ray.data.from_items([{"block": block} for block in blocks], override_num_blocks=len(blocks)).map_batches(
        PartWriter,
        fn_constructor_args=writer,
        batch_size=1,
        num_cpus=cpus,
        num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(most, len(blocks))),
    )
    said, rows = time.monotonic(), 0
    try:
        for done, row in enumerate(data.iter_rows(), 1):
            rows += row["rows"]
            if (error := json.loads(row["error"])) is not None:
                raise revive(error)
            if display is not None and time.monotonic() - said > LINE_EVERY_S:
                said = time.monotonic()
                display.note(f"{done} of {len(blocks)} parts, {rows} texts")
    except ray.exceptions.RayError as exc:
        message = str(exc).strip().splitlines()
        raise EngineCrashed(
            f"Ray ended the job: {message[-1] if message else exc!r}", details={"cause": "ray"}
        ) from exc


def _check_same(common: dict[str, Any], facts: dict[str, Any], what: str) -> None:
    """Raise InvalidRequest where *facts*, of a part or a machine, are of another result than *common*."""
    other = [name for name in SAME if facts.get(name) != common.get(name)]
    if other:
        said = "; ".join(f"{name} {facts.get(name)}, not {common.get(name)}" for name in other)
        raise InvalidRequest(
            f"{what} would be mixed with another result ({said}). Take another folder, or remove what is there",
            details={"what": what, "differs": other},
        )


def _finish(files: Any, folder: str, blocks: Iterable[Block], common: dict[str, Any]) -> dict[str, Any]:
    """Check that every block has its part, and write the manifest and the list of errors from what the parts say."""
    made: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for block in blocks:
        path = parts.part_path(folder, block, common)
        facts = parts.part_facts(files, path)
        if facts is None:
            raise InvalidRequest(f"{path}: the part of {block.file} is gone. Run it again")
        _check_same(common, facts, path)
        errors += facts["errors"]
        kept = {name: facts.get(name) for name in ("rows", "engine", "kernel_revision")}
        made.append({"part": posixpath.basename(path), "file": block.file, **kept})
    parts.sweep(files, folder)
    document = {**common, "n": sum(part["rows"] for part in made), "skipped": len(errors), "parts": made}
    parts.write_text(files, posixpath.join(folder, parts.MANIFEST), json.dumps(document, indent=1))
    if errors:
        lines = (json.dumps({name: entry[name] for name in ("where", "code", "message")}) + "\n" for entry in errors)
        parts.write_text(files, posixpath.join(folder, "errors.jsonl"), "".join(lines))
    return document
