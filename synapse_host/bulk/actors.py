"""What runs on the machines of a cluster: :class:`Embedder` for any program on Ray, and the command's own actor.

Each holds one host (:class:`~synapse_host.sync.SyncHost`), which supervises its worker there and places its lane by
that machine's matrix.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from synapse_host.bulk import parts
from synapse_host.bulk.embedding import Job, described
from synapse_host.bulk.entries import Policy
from synapse_host.bulk.output import Left
from synapse_host.bulk.parts import Block
from synapse_host.config import HostConfig
from synapse_host.errors import EngineCrashed, InvalidRequest, QueueFull, SynapseError
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

        if self._column not in batch:
            raise InvalidRequest(f"there is no column {self._column!r} (have: {', '.join(batch)})")
        texts = list(batch[self._column])
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"text {index}: column {self._column} holds {type(text).__name__}, not text",
                    details={"index": index},
                )
        options: dict[str, Any] = {"lane": self.lane, "truncate": self._truncate, "prompt": self._prompt}
        options["dimensions"] = self._dimensions
        result = self.host.embed_result(self.model, [str(text) for text in texts], **options)
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
    """What an actor of the command does: reads a block, embeds it and writes its part.

    What is wrong with its machine is the answer to every block: Ray would only keep the text of a constructor's error.
    """

    def __init__(self, source: str, out: str, common: dict[str, Any], policy: Policy, embedder: dict[str, Any]) -> None:
        self._unfit: SynapseError | None = None
        try:
            self._prepare(source, out, common, policy, embedder)
        except SynapseError as exc:
            self._unfit = exc

    def _prepare(self, source: str, out: str, common: dict[str, Any], policy: Policy, embedder: dict[str, Any]) -> None:
        self._embedder = Embedder(**embedder)
        self._facts = {**common, **self._embedder.facts()}
        check_same(common, self._facts, "this machine's engine")
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
                if self._unfit is not None:
                    raise self._unfit
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


def check_same(common: dict[str, Any], facts: dict[str, Any], what: str) -> None:
    """Raise InvalidRequest where *facts*, of a part or a machine, are of another result than *common*."""
    other = [name for name in SAME if facts.get(name) != common.get(name)]
    if other:
        said = "; ".join(f"{name} {facts.get(name)}, not {common.get(name)}" for name in other)
        raise InvalidRequest(
            f"{what} would be mixed with another result ({said}). Take another folder, or remove what is there",
            details={"what": what, "differs": other},
        )
