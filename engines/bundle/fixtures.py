"""Reference fixtures of a bundle: probes and what the reference computed for them, in one ``.npz`` without pickles.

Arrays, by task (n probes):

``meta``          uint8: JSON ``{"format": "synapse-fixtures-v2", "task", "computed_by"}``, the last a ``Reference``
``texts``         uint8: JSON list; embed and generate: strings, rerank: ``[query, document]``; null for a probe made of
                  ids only (rows at the edges of what a model takes)
embed             ``input_ids`` int32, ``cu_seqlens`` int32 (n + 1): rows with special tokens;
                  ``vectors_q`` int16 (n, dims), ``vectors_scale`` float32 (n): vector = q * scale
rerank            ``query_ids``, ``query_cu``, ``candidate_ids``, ``candidate_cu`` int32: bare ids; ``query_of``
                  int32 (n); ``logits`` float32 (n): raw
generate          ``input_ids``, ``cu_seqlens``; ``greedy`` int32 (n, steps): the reference's own continuation;
                  ``clear`` uint8 (n, steps): 1 where its best token stands well apart from the second

Why int16 is enough for a cosine gate at 0.9999: each component is off by at most half a step, scale / 2 <= max|v| /
65534, so a unit vector of 384 dims moves by at most sqrt(384) / 65534 = 3.0e-4 in the worst case and typically by
1e-5; the cosine moves by half the square of that: below 4.5e-8.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from engines.bundle.manifest import BundleError, open_plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    FloatArray = npt.NDArray[np.float32]

FORMAT: Final = "synapse-fixtures-v2"
FILE_NAME: Final = "fixtures.npz"
MAX_BYTES: Final = 64 * 1024 * 1024
_KEYS: Final = {
    "embed": ("input_ids", "cu_seqlens", "vectors_q", "vectors_scale"),
    "rerank": ("query_ids", "query_cu", "candidate_ids", "candidate_cu", "query_of", "logits"),
    "generate": ("input_ids", "cu_seqlens", "greedy", "clear"),
}


OURS: Final = ("synapse", "owned", "llama", "ggml", "onnxruntime", "coreml", "ane")
"""What the engines that are judged by a reference are called, and what they compute with, as a name begins."""


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """Who computed the reference: a programme with its version, in which arithmetic, from which file of weights.

    ``stored``: how that file holds its weights. Where they are quantised the reference starts from the rounded ones,
    so what that rounding cost the published model is no part of any comparison with it.
    """

    program: Annotated[str, Meta(min_length=1)]
    version: Annotated[str, Meta(min_length=1)]
    dtype: Annotated[str, Meta(min_length=1)]
    weights: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
    stored: Annotated[str, Meta(min_length=1)]

    def __str__(self) -> str:
        kept = "" if self.stored in ("f32", "f16", "bf16") else ", whose rounding is part of the reference"
        return f"{self.program} {self.version} in {self.dtype}, weights {self.weights[:19]}… in {self.stored}{kept}"


def independent(reference: Reference) -> bool:
    """Return whether a reference was computed by something else than an engine that is to be judged by it."""
    return not reference.program.strip().lower().startswith(OURS)


@dataclass(frozen=True)
class Fixtures:
    """Opened fixtures. ``arrays`` holds the task's arrays by the names above; ``texts`` as stored."""

    task: str
    computed_by: Reference
    texts: list[Any]
    arrays: dict[str, Array]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def distinct(self) -> int:
        """How many probes are no other probe once more."""
        if self.task != "rerank":
            return len({row.tobytes() for row in self.rows()})
        asked = zip(self.arrays["query_of"].tolist(), self.rows("candidate"), strict=True)
        return len({(query, row.tobytes()) for query, row in asked})

    @property
    def vectors(self) -> FloatArray:
        """Reference vectors of an embedding model, float32 (n, dims)."""
        import numpy as np

        scaled: FloatArray = self.arrays["vectors_q"].astype(np.float32) * self.arrays["vectors_scale"][:, None]
        return scaled

    def rows(self, prefix: str = "") -> list[Array]:
        """Return the id rows as views: ``""`` for embed and generate, ``"query"`` or ``"candidate"`` for rerank."""
        ids = self.arrays[f"{prefix}_ids" if prefix else "input_ids"]
        cu = self.arrays[f"{prefix}_cu" if prefix else "cu_seqlens"].tolist()
        return [ids[start:end] for start, end in pairwise(cu)]


def quantize(vectors: Array) -> tuple[Array, FloatArray]:
    """Return int16 rows and their float32 scales for finite vectors (n, dims)."""
    import numpy as np

    peak = np.abs(vectors).max(axis=1)
    scale = np.where(peak > 0, peak / 32767, 1).astype(np.float32)
    return np.rint(vectors / scale[:, None]).astype(np.int16), scale


def flatten(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return rows end to end and their offsets, both int32."""
    import numpy as np

    lengths = [len(row) for row in rows]
    ids = np.fromiter((n for row in rows for n in row), np.int32, sum(lengths))
    return ids, np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def write(path: Path, *, task: str, texts: Sequence[Any], computed_by: Reference, arrays: dict[str, Array]) -> None:
    """Write fixtures; the same input gives the same bytes."""
    import numpy as np

    def packed(value: Any) -> Array:
        return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), np.uint8)

    meta = {"format": FORMAT, "task": task, "computed_by": msgspec.to_builtins(computed_by)}
    np.savez_compressed(path, meta=packed(meta), texts=packed(list(texts)), **arrays)  # type: ignore[arg-type]


def read(path: Path) -> Fixtures:
    """Read and check fixtures. Raises BundleError naming the file and what is wrong."""
    import zipfile

    import numpy as np

    try:
        with open_plain(path) as file:
            with zipfile.ZipFile(file) as archive:
                size = sum(info.file_size for info in archive.infolist())
            if size > MAX_BYTES:
                raise BundleError(f"{path}: {size} bytes unpacked, at most {MAX_BYTES}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        meta, texts = (json.loads(arrays.pop(name).tobytes()) for name in ("meta", "texts"))
        if meta["format"] != FORMAT or set(arrays) != set(_KEYS[meta["task"]]):
            raise BundleError(f"{path}: not fixtures of format {FORMAT}; build the bundle again")
        found = Fixtures(meta["task"], msgspec.convert(meta["computed_by"], Reference), texts, arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, msgspec.ValidationError) as exc:
        raise BundleError(f"{path}: not readable as reference fixtures ({exc})") from exc
    _check(path, found)
    return found


def _check(path: Path, found: Fixtures) -> None:
    import numpy as np

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise BundleError(f"{path}: {what} don't fit the {len(found)} probes; the file is damaged")

    arrays, n = found.arrays, len(found)
    pairs = (("query_ids", "query_cu"), ("candidate_ids", "candidate_cu"))
    for ids, cu in pairs if found.task == "rerank" else (("input_ids", "cu_seqlens"),):
        need(arrays[ids].dtype == np.int32 and arrays[cu].dtype == np.int32 and arrays[cu].ndim == 1, ids)
        steps = np.diff(arrays[cu])
        need(len(steps) > 0 and bool((steps > 0).all()) and arrays[cu][0] == 0, cu)
        need(int(arrays[cu][-1]) == len(arrays[ids]), cu)
        need(cu == "query_cu" or len(steps) == n, cu)
    if found.task == "embed":
        need(arrays["vectors_q"].dtype == np.int16 and len(arrays["vectors_q"]) == n, "vectors")
        need(arrays["vectors_scale"].shape == (n,) and bool(np.isfinite(arrays["vectors_scale"]).all()), "scales")
    elif found.task == "rerank":
        need(arrays["logits"].shape == (n,) and bool(np.isfinite(arrays["logits"]).all()), "logits")
        of = arrays["query_of"]
        need(of.shape == (n,) and bool(((of >= 0) & (of < len(arrays["query_cu"]) - 1)).all()), "queries")
    else:
        need(arrays["greedy"].dtype == np.int32 and len(arrays["greedy"]) == n, "continuations")
        need(arrays["clear"].dtype == np.uint8 and arrays["clear"].shape == arrays["greedy"].shape, "clear steps")
