"""What hw_matrix.yaml may contain, as a table: it reads nodes, names the nearest valid key, and is the JSON Schema.

``synapse matrix schema`` prints the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from synapse_host.placement.source import Mapping, Node, Scalar, Sequence, Source

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def join(path: str, key: str) -> str:
    """Return the key path one level down."""
    return f"{path}.{key}" if path else key


def shown(node: Node) -> str:
    """Return how a value is called in an error."""
    match node:
        case Scalar(value=None):
            return "nothing"
        case Scalar(text=text):
            return repr(text)
        case Sequence():
            return "a list"
        case Mapping():
            return "a mapping"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what an error says of an unknown name: the nearest known one, or all of them."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else f"; known: {', '.join(known)}"


@dataclass(frozen=True, slots=True)
class Word:
    """A string, by pattern or out of a closed list."""

    pattern: str | None = None
    choices: tuple[str, ...] = ()
    example: str = ""

    def read(self, node: Node, source: Source, path: str) -> str:
        """Return the string; a number or boolean is told to wear quotes."""
        if not isinstance(node, Scalar) or node.value is None:
            raise source.error(node.mark, path, f"must be a word, not {shown(node)}")
        if not isinstance(node.value, str):
            if isinstance(node.value, bool):
                why = f'YAML reads {node.text} as a boolean; write it in quotes: "{node.text}"'
            else:
                why = f'must be text; write it in quotes: "{node.text}"'
            raise source.error(node.mark, path, why)
        if self.choices and node.value not in self.choices:
            raise source.error(node.mark, path, f"unknown value {node.value!r}{nearest(node.value, self.choices)}")
        if self.pattern and not re.search(self.pattern, node.value):
            hint = f", such as {self.example!r}" if self.example else ""
            raise source.error(node.mark, path, f"{node.value!r} must match {self.pattern}{hint}")
        return node.value


@dataclass(frozen=True, slots=True)
class Flag:
    """``true`` or ``false``."""

    def read(self, node: Node, source: Source, path: str) -> bool:
        """Return the boolean."""
        if not isinstance(node, Scalar) or not isinstance(node.value, bool):
            raise source.error(node.mark, path, f"must be true or false, not {shown(node)}")
        return node.value


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a closed range."""

    low: float
    high: float
    whole: bool = False

    def read(self, node: Node, source: Source, path: str) -> float | int:
        """Return the number."""
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            noun = "whole number" if self.whole else "number"
            raise source.error(node.mark, path, f"must be a {noun}, not {shown(node)}")
        if not self.low <= value <= self.high:
            raise source.error(node.mark, path, f"must be between {self.low:g} and {self.high:g}, not {value:g}")
        return value


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of one kind without repeats; where ``bare`` is set one value may stand without brackets."""

    item: Kind
    bare: bool = False
    at_least: int = 0
    unique: bool = True

    def read(self, node: Node, source: Source, path: str) -> tuple[Any, ...]:
        """Return the items as a tuple."""
        if self.bare and isinstance(node, Scalar):
            return (self.item.read(node, source, path),)
        if not isinstance(node, Sequence):
            raise source.error(node.mark, path, f"must be a list, not {shown(node)}")
        if len(node.items) < self.at_least:
            raise source.error(node.mark, path, f"needs at least {self.at_least} entry")
        values: list[Any] = []
        for i, item in enumerate(node.items):
            value = self.item.read(item, source, f"{path}[{i}]")
            if self.unique and value in values:
                raise source.error(item.mark, f"{path}[{i}]", f"{value!r} is listed twice")
            values.append(value)
        return tuple(values)


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping from free names to one kind."""

    value: Kind
    key: str = NAME
    at_least: int = 0

    def read(self, node: Node, source: Source, path: str) -> dict[str, Any]:
        """Return a dict in file order."""
        if not isinstance(node, Mapping):
            raise source.error(node.mark, path, f"must be a mapping, not {shown(node)}")
        if len(node.items) < self.at_least:
            raise source.error(node.mark, path, f"needs at least {self.at_least} entry")
        values: dict[str, Any] = {}
        for name, (mark, value) in node.items.items():
            if not re.search(self.key, name):
                raise source.error(mark, join(path, name), f"the name {name!r} must match {self.key}")
            values[name] = self.value.read(value, source, join(path, name))
        return values


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a record."""

    kind: Kind
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A mapping with a closed list of keys."""

    fields: dict[str, Field]
    doc: str = ""

    def read(self, node: Node, source: Source, path: str) -> dict[str, Any]:
        """Return the keys that are present; an unknown one names its nearest neighbour."""
        if not isinstance(node, Mapping):
            raise source.error(node.mark, path, f"must be a mapping, not {shown(node)}")
        values: dict[str, Any] = {}
        for key, (mark, value) in node.items.items():
            field = self.fields.get(key)
            if field is None:
                raise source.error(mark, join(path, key), f"unknown key{nearest(key, self.fields)}")
            values[key] = field.kind.read(value, source, join(path, key))
        for key, field in self.fields.items():
            if field.required and key not in values:
                raise source.error(node.mark, join(path, key), f"is missing: {field.doc}")
        return values


Kind: TypeAlias = Word | Flag | Number | Listing | Table | Record
"""One kind of value; ``read`` returns a node's plain value, or raises MatrixInvalid with its place."""

_SHARE = Number(0, 1)
_FREE = r"^[^\0]*$"

THRESHOLDS: Final = Record(
    {
        "embed": Field(
            Record(
                {
                    "min_cosine": Field(_SHARE, "smallest cosine of any row against the reference"),
                    "mean_cosine": Field(_SHARE, "mean cosine against the reference"),
                    "worst_decile": Field(_SHARE, "share of its nearest tenth that a row keeps, worst tenth"),
                    "batch_single": Field(_SHARE, "smallest cosine of a row in a batch against the row alone"),
                }
            ),
            "gates of embedding lanes",
        ),
        "rerank": Field(
            Record(
                {
                    "pearson": Field(_SHARE, "Pearson correlation of the logits with the reference"),
                    "max_error": Field(Number(0, 1000), "largest difference of one logit"),
                }
            ),
            "gates of reranking lanes",
        ),
        "generate": Field(
            Record(
                {
                    "top1": Field(_SHARE, "share of reference prefixes with the same next token"),
                    "first_token": Field(_SHARE, "share of prompts with the same first token"),
                }
            ),
            "gates of generating lanes",
        ),
        "approximate": Field(
            Record(
                {
                    "pearson": Field(_SHARE, "Pearson correlation asked of an int8 artifact"),
                    "top1": Field(_SHARE, "share of rows (queries) with the reference's nearest row (document)"),
                }
            ),
            "gates of artifacts in the precision class 'approximate' (int8)",
        ),
        "placement": Field(
            Record(
                {
                    "share": Field(_SHARE, "share of operations on the Neural Engine"),
                    "cost_share": Field(_SHARE, "share of estimated cost on the Neural Engine"),
                    "speedup": Field(Number(0, 1000), "speed against the same model on the CPU only"),
                }
            ),
            "gates of lanes on the Neural Engine",
        ),
    },
    "Certification thresholds; an engine may override single ones.",
)

HARDWARE: Final = Record(
    {
        "os": Field(Listing(Word(choices=("linux", "darwin", "windows")), bare=True, at_least=1), "operating systems"),
        "arch": Field(Listing(Word(choices=("x86_64", "arm64")), bare=True, at_least=1), "processor architectures"),
        "min_os": Field(Word(r"^\d+(\.\d+){0,3}$", example="14.4"), "oldest operating system version, in quotes"),
        "min_driver_api": Field(
            Number(1, 10**6, whole=True), "oldest CUDA driver API (cuDriverGetVersion), 13000 is 13.0"
        ),
        "min_compute_capability": Field(Word(r"^\d+\.\d+$", example="7.5"), "lowest compute capability, in quotes"),
        "neural_engine": Field(Flag(), "true: needs an Apple Neural Engine; false: needs its absence"),
        "cpu_features": Field(
            Listing(Word(r"^[a-z0-9_]+$", example="avx512_bf16"), bare=True), "instruction sets, as in /proc/cpuinfo"
        ),
    },
    "A hardware class: every condition must hold; none at all fits every machine.",
)

ENGINE: Final = Record(
    {
        "engine": Field(Word(choices=("llama", "cuda", "ane")), "which worker protocol dialect", required=True),
        "device": Field(Word(r"^(cpu|metal|ane|cuda(:\d{1,3})?)$", example="cpu"), "cpu, cuda[:N], metal or ane", True),
        "format": Field(Word(choices=("gguf", "safetensors-package", "coreml")), "artifact format", required=True),
        "requires": Field(Word(NAME), "a hardware class", required=True),
        "dtype": Field(
            Listing(Word(r"^[a-z0-9_]{1,16}$", example="f16"), bare=True, at_least=1),
            "artifact dtypes in order of preference; others are not taken (default: the engine's own order, no int8)",
        ),
        "kernel_revision": Field(Word(r"^\S{1,256}$"), "pin: a worker that reports another one is refused"),
        "pytest_marker": Field(Word(r"^[a-z_]+$", example="cuda"), "marker of this engine's hardware tests"),
        "env": Field(Table(Word(_FREE), r"^[A-Za-z_][A-Za-z0-9_]*$"), "extra environment variables of the worker"),
        "runtime_config": Field(Table(Word(_FREE), r"^[a-z][a-z0-9_]*$"), "LOAD's runtime_config; every value is text"),
        "worker": Field(
            Record(
                {"command": Field(Listing(Word(r"^[^\0]+$"), at_least=1, unique=False), "program and arguments", True)}
            ),
            "another worker program; its working directory is this file's folder",
        ),
        "thresholds": Field(THRESHOLDS, "thresholds that differ on this engine"),
    },
    "An engine: a worker program on a device.",
)

LANE: Final = Record(
    {
        "task": Field(Word(choices=("embed", "rerank", "generate")), "what the lane does", required=True),
        "engines": Field(Listing(Word(NAME), at_least=1), "engines in order of preference; the first that fits", True),
        "kind": Field(Word(choices=("catalog", "legacy")), "quarantine rule: cool-down (catalog) or probe (legacy)"),
        "pin": Field(Word(NAME), "this engine or none"),
        "require_certificate": Field(Flag(), "true: an uncertified engine answers not_certified"),
    },
    "A lane: a task and the engines that may serve it.",
)

MATRIX: Final = Record(
    {
        "version": Field(Number(1, 1, whole=True), "version of this format: 1", required=True),
        "hardware": Field(Table(HARDWARE, at_least=1), "hardware classes", required=True),
        "engines": Field(Table(ENGINE, at_least=1), "engines", required=True),
        "lanes": Field(Table(LANE, at_least=1), "lanes", required=True),
        "thresholds": Field(THRESHOLDS, "certification thresholds"),
    },
    "hw_matrix.yaml: what runs where.",
)


def schema(kind: Kind) -> dict[str, Any]:
    """Return the same rule as JSON Schema."""
    rule: dict[str, Any]
    match kind:
        case Flag():
            return {"type": "boolean"}
        case Number(low, high, whole):
            return {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
        case Word(pattern, choices):
            rule = {"type": "string", "enum": list(choices), "pattern": pattern}
        case Listing(item, _, at_least, unique):
            rule = {"type": "array", "items": schema(item), "uniqueItems": unique or None, "minItems": at_least}
        case Table(value, key, at_least):
            rule = {"type": "object", "additionalProperties": schema(value), "propertyNames": {"pattern": key}}
            rule["minProperties"] = at_least
        case Record(fields, doc):
            properties = {key: {**schema(field.kind), "description": field.doc} for key, field in fields.items()}
            rule = {"type": "object", "additionalProperties": False, "properties": properties, "description": doc}
            rule["required"] = [key for key, field in fields.items() if field.required]
    # What has no value says nothing.
    rule = {key: value for key, value in rule.items() if value or value is False}
    return {"anyOf": [schema(kind.item), rule]} if isinstance(kind, Listing) and kind.bare else rule


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of hw_matrix.yaml."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hw_matrix.yaml",
        **schema(MATRIX),
    }
