"""The evidence document: everything a verdict was made from, as JSON.

A document holds what was measured per probe, every threshold, version, digest and the machine's profile (no serial
numbers), the gates that follow from them and the verdict; :mod:`synapse_host.certificates.verdict` computes those two
from the rest. Field names are the JSON keys. ``synapse certify --schema`` prints the JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from engines.bundle.fixtures import Reference
from engines.bundle.manifest import canonical_bytes, read_plain
from synapse_host.errors import InvalidRequest

MAX_BYTES: Final = 64 * 1024 * 1024
DIGITS: Final = 9
"""Decimals kept of measured numbers; gates are computed from what is recorded, so nothing is lost on the way."""

Verdict: TypeAlias = Literal["certified", "uncertified"]
Precision: TypeAlias = Literal["exact", "approximate"]
Comparison: TypeAlias = Literal[">=", "<=", "=="]
Series: TypeAlias = list[float | None]
"""One number a probe; null where there is no answer because it was not finite."""
Origin: TypeAlias = Literal["project", "computed_here", "bundle"]
"""Whose reference it is: shipped with this project, computed on this machine, or put into the bundle by its author."""


class Gate(Struct, frozen=True, forbid_unknown_fields=True):
    """One test of the verdict: ``value comparison threshold``. ``group``: what went wrong when it fails."""

    name: str
    group: str
    value: float | None
    comparison: Comparison
    threshold: float
    passed: bool


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The bundle and the artifact that was loaded."""

    name: str
    model_id: str
    family: str
    task: Literal["embed", "rerank", "generate"]
    dims: int
    max_tokens: int
    manifest_digest: str
    artifact_digest: str
    format: str
    dtype: str
    bytes: int | None = None
    tree: str | None = None
    source: str | None = None
    tokenizer: str | None = None
    """Digest of the bundle's tokenizer; null where it has none."""


class EngineFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine of the matrix and what its worker said at the handshake; null where there was none."""

    id: str
    device: str
    """What the worker was started with."""
    command: list[str]
    """Of a foreign worker; empty for our own."""
    runtime_config: dict[str, str]
    """LOAD's, as it was sent."""
    packages: dict[str, str]
    """The packages that the engine needs, with versions; on a GPU the CUDA libraries' wheels too."""
    expected: str
    """The engine name HELLO must carry."""
    observed: str | None = None
    version: str | None = None
    build_flags: dict[str, str] = {}
    kernel_revision: str | None = None
    packed_widths: list[int] = []
    buckets: list[int] = []
    env: dict[str, str] = {}
    """Variables of the worker's environment that may change numbers, each with a digest of its value."""
    build: str | None = None
    """Digest of the engine's native libraries and of the worker's sources; null where they can't be found."""


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine by kind. It holds nothing that names one single machine."""

    os: str
    os_version: str
    os_build: str
    arch: str
    cpu: str
    cpu_features: list[str]
    cores: int
    cores_total: int
    quota: float | None
    ram_bytes: int
    driver: str | None = None
    """The accelerator's driver, such as ``cuda 13000, 580.159.03``; null on the CPU."""
    accelerator: str | None = None


class Fixture(Struct, frozen=True, forbid_unknown_fields=True):
    """The reference fixtures used."""

    expected_digest: str
    """As the manifest has it."""
    digest: str
    computed_by: Reference
    probes: int
    stale_rows: int
    """Probes whose text the bundle's own tokenizer turns into other ids than the reference saw."""
    distinct: int
    """Probes that are no other probe once more."""
    origin: Origin


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """One length at the edge: ``expected`` and ``outcome`` are ``ok`` or an error code."""

    name: str
    tokens: int
    expected: str
    outcome: str


class EmbedInputs(Struct, frozen=True, forbid_unknown_fields=True, tag="embed", tag_field="task"):
    """Per probe. Against the reference go the single answers; batches are compared with the singles."""

    cosine: Series
    norm: Series
    """Length of the single answer: against 1 where the bundle normalises, else against the reference's."""
    overlap: Series
    """Share of the row's nearest neighbours that it keeps."""
    batch_own: Series
    batch_best: Series
    permuted_own: Series
    permuted_best: Series
    batch_norm: Series
    """Length of the batch's row against the single answer that is nearest to it."""
    permuted_norm: Series
    neighbour: list[int | None]
    """Nearest other row, among those that have an answer."""
    reference_neighbour: list[int | None]
    neighbour_pearson: Series
    unit: bool
    """The bundle normalises."""


class RerankInputs(Struct, frozen=True, forbid_unknown_fields=True, tag="rerank", tag_field="task"):
    """Per pair: raw logits. ``exchange``: which request of the batch runs carried it."""

    query: list[int]
    reference: list[float]
    single: Series
    batch: Series
    permuted: Series
    exchange: list[int]


class GenerateInputs(Struct, frozen=True, forbid_unknown_fields=True, tag="generate", tag_field="task"):
    """Per prompt. ``greedy``: ids after the prompt; a stop token ends a list and is not in it. ``stops``: those ids.

    ``next``: the id that follows the prompt and the first ``depth`` ids of the reference; -1 is a stop.
    """

    reference: list[list[int]]
    greedy: list[list[int]]
    depth: list[int]
    next: list[int]
    stops: list[int]


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the framework intends to run one function. ``operations``: operator -> device -> count; devices are cpu,
    gpu, neuralEngine, unknown, and const for constants. ``cost``: device -> estimated share of the run."""

    name: str
    kind: Literal["bucket", "packed"]
    tokens: int
    operations: dict[str, dict[str, int]]
    cost: dict[str, float]
    ops_sha256: str


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of where the lane ran. ``share``: PONG's, asked after the run, in the run's worker generation."""

    share: float | None
    generation: int
    functions: list[Function] = []
    reason: str | None = None
    """Why there is no table of functions."""
    cpu_allowed: list[str] = []
    """Operators that may stay on the CPU, by the engine's own list."""
    forced_ms: list[float] = []
    """Single calls of the same rows with the engine forced to the CPU; empty where it can't be forced."""
    native_ms: list[float] = []
    """The same rows on the lane itself."""


class Packing(Struct, frozen=True, forbid_unknown_fields=True):
    """One packed width under trial; one number a row, mix after mix. ``mixes``: the tokens of each mix's rows.

    ``cosine``: packed among neighbours against the same row on its rung. ``alone``: largest difference of a component
    from the same row in a pass of its own; ``moved``: from the same row when the mix's order is turned round. Null
    where an answer was not finite.
    """

    width: int
    mixes: list[list[int]]
    cosine: Series
    alone: Series
    moved: Series
    reason: str | None = None
    """Why the trial ended early; then the width does not qualify."""


class Performance(Struct, frozen=True, forbid_unknown_fields=True):
    """Reported, never gated. Milliseconds through the host; ``batch_tokens`` in ``batch_s`` seconds.

    ``equal_ms``: one call of 32 texts of 64 tokens, the best of a few; an embedder's, and no older document has it.
    """

    single_ms: list[float]
    batch_tokens: int
    batch_s: float
    equal_ms: float | None = None
    load_ms: float | None = None
    rss_mb: int | None = None


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """Why a run ended early."""

    code: str
    message: str
    stage: str


class Evidence(Struct, frozen=True, forbid_unknown_fields=True):
    """The document. ``digest``: SHA-256 of its canonical form without that key; it shows accidents, not forgers."""

    format: Literal["synapse-evidence-v1"]
    created: str
    lane: str
    software: dict[str, str]
    model: Model
    engine: EngineFacts
    machine: Machine
    precision: Precision
    thresholds: dict[str, float]
    placement_required: bool
    fixture: Fixture | None
    tokens: list[int]
    """Tokens of every probe, special ones included."""
    generations: list[int]
    """Worker generations that served the run; more than one means that a worker was lost."""
    limits: list[Case]
    repeat_differs: int | None
    """Rows whose bits changed when the same exchange was sent again; null where none could be compared."""
    non_finite: dict[str, int]
    """By stage of the run: rows that a first attempt left without an answer, because it held NaN or infinity."""
    performance: Performance
    gates: list[Gate]
    reported: dict[str, float]
    verdict: Verdict
    reasons: list[str]
    inputs: EmbedInputs | RerankInputs | GenerateInputs | None = None
    placement: Placement | None = None
    packing: list[Packing] = []
    """Trials of packed widths: those that pass may serve, the others may not. No part of the verdict."""
    cost_ms: dict[str, float] = {}
    """Measured through the host: one row of each bucket's function, one pass of each packed function."""
    fault: Fault | None = None
    digest: str = ""


def digest_of(document: dict[str, Any]) -> str:
    """Return ``sha256:<hex>`` of a plain document's canonical bytes without its ``digest``."""
    bare = {key: value for key, value in document.items() if key != "digest"}
    return "sha256:" + hashlib.sha256(canonical_bytes(bare)).hexdigest()


def write(path: Path, evidence: Evidence) -> None:
    """Write a document with its digest, whole or not at all."""
    document = msgspec.to_builtins(evidence)
    document["digest"] = digest_of(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n", "utf-8")
    part.replace(path)


def read(path: Path) -> tuple[Evidence, str]:
    """Read a document; return it and what its digest should be. InvalidRequest names the file and the key."""
    try:
        # Refuses NaN and what is out of range: 1e999 would be read as infinity, which is above every threshold.
        document = msgspec.json.decode(read_plain(path, MAX_BYTES))
        evidence = msgspec.convert(document, Evidence)
    except OSError as exc:
        raise InvalidRequest(f"{path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path} is no evidence document ({exc})") from exc
    return evidence, digest_of(document)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Evidence of a certification run",
        **msgspec.json.schema(Evidence),
    }
