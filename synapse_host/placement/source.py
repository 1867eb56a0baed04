"""YAML with positions: plain values whose every key and value knows its line and column.

Only plain data comes out (no tags, anchors, merge keys), so a matrix can't run code or grow without bound. Duplicate
keys are refused, and a bare ``on``, ``no`` or ``yes`` as a key is told apart from a word: YAML reads it as a boolean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from synapse_host.errors import MatrixInvalid

if TYPE_CHECKING:
    import yaml

MAX_BYTES: Final = 256 * 1024
MAX_VALUES: Final = 8192
"""Keys and values of a file; the packaged matrix has 400. PyYAML takes 30 us and more for each."""
MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar: its plain value, the text as written, and where."""

    value: str | int | float | bool | None
    text: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping: by key, the key's own mark and the value."""

    items: dict[str, tuple[Mark, Node]]
    mark: Mark


Node: TypeAlias = Scalar | Sequence | Mapping


@dataclass(frozen=True, slots=True)
class Source:
    """Names the file in errors."""

    name: str

    def error(self, mark: Mark, path: str, what: str) -> MatrixInvalid:
        """Return the error ``file:line:column: key.path: what``."""
        place = f"{path}: " if path else ""
        return MatrixInvalid(
            f"{self.name}:{mark.line}:{mark.column}: {place}{what}",
            details={"file": self.name, "line": mark.line, "column": mark.column, "key": path},
        )


def parse(text: bytes, source: Source) -> Node:
    """Return the one document in *text*; MatrixInvalid says where it isn't plain YAML."""
    import yaml

    start = Mark(1, 1)
    if len(text) > MAX_BYTES:
        raise source.error(start, "", f"{len(text)} bytes, at most {MAX_BYTES}")

    class Bounded(yaml.SafeLoader):
        """Stops where there is too much, before the rest is read."""

        values = depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            self.values += 1
            if self.values > MAX_VALUES:
                raise yaml.YAMLError(f"more than {MAX_VALUES} keys and values")
            # Twice what is accepted below: there the message has the place.
            if self.depth > 2 * MAX_DEPTH:
                raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        root = yaml.compose(text.decode(), Loader=Bounded)
    except UnicodeDecodeError as exc:
        raise source.error(start, "", f"not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = Mark(mark.line + 1, mark.column + 1) if mark else start
        raise source.error(place, "", f"not valid YAML: {exc.problem or exc.context}") from exc
    except (yaml.YAMLError, RecursionError) as exc:
        raise source.error(start, "", f"not valid YAML: {exc}") from exc
    if root is None:
        raise source.error(start, "", "the file is empty; the shortest valid one starts with 'version: 1'")
    return _convert(root, source, "", set(), 0)


def _convert(node: yaml.Node, source: Source, path: str, seen: set[int], depth: int) -> Node:
    import yaml

    mark = Mark(node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.ScalarNode):
        _check_text(node, source, path, mark)
    # An alias gives the same node object again. Refused: nested ones grow without bound.
    if id(node) in seen:
        raise source.error(mark, path, "anchors and aliases are not supported here; write the value out")
    seen.add(id(node))
    if depth > MAX_DEPTH:
        raise source.error(mark, path, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.MappingNode):
        if node.tag != "tag:yaml.org,2002:map":
            raise source.error(mark, path, f"the tag {node.tag!r} is not supported")
        items: dict[str, tuple[Mark, Node]] = {}
        for key_node, value_node in node.value:
            key_mark = Mark(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            key = _key(key_node, source, path, key_mark)
            key_path = f"{path}.{key}" if path else key
            if key in items:
                first = items[key][0]
                raise source.error(key_mark, key_path, f"the key occurs twice (first in line {first.line})")
            items[key] = (key_mark, _convert(value_node, source, key_path, seen, depth + 1))
        return Mapping(items, mark)
    if isinstance(node, yaml.SequenceNode):
        if node.tag != "tag:yaml.org,2002:seq":
            raise source.error(mark, path, f"the tag {node.tag!r} is not supported")
        return Sequence(
            tuple(_convert(item, source, f"{path}[{i}]", seen, depth + 1) for i, item in enumerate(node.value)), mark
        )
    return Scalar(_scalar(node, source, path, mark), str(node.value), mark)


def _check_text(node: yaml.ScalarNode, source: Source, path: str, mark: Mark) -> None:
    # An escape can write half a surrogate pair, which no argument, variable or file name can hold.
    try:
        str(node.value).encode()
    except UnicodeEncodeError:
        raise source.error(mark, path, "half a surrogate pair is not valid text") from None


def _key(node: yaml.Node, source: Source, path: str, mark: Mark) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise source.error(mark, path, "a key must be a word")
    _check_text(node, source, path, mark)
    text = str(node.value)
    if node.tag == "tag:yaml.org,2002:str":
        return text
    if node.tag == "tag:yaml.org,2002:merge":
        raise source.error(mark, path, "merge keys (<<) are not supported; write the keys out")
    is_bool = node.tag == "tag:yaml.org,2002:bool"
    why = f"YAML reads the key {text} as a boolean" if is_bool else f"the key {text} is not a word"
    raise source.error(mark, f"{path}.{text}" if path else text, f'{why}; write it in quotes: "{text}"')


def _scalar(node: yaml.Node, source: Source, path: str, mark: Mark) -> str | int | float | bool | None:
    text = str(node.value)
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "str" | "timestamp":
            return text
        case "bool":
            return text.lower() in ("true", "yes", "on")
        case "null":
            return None
        case "int" | "float" as kind:
            try:
                if kind == "int" and len(text) > 20:
                    raise ValueError("no setting has as many digits")
                return int(text.replace("_", "")) if kind == "int" else float(text.replace("_", ""))
            except ValueError:
                # 0x10, 0o17, 1:30: YAML 1.1 has more numbers than a reader expects.
                raise source.error(mark, path, f"{text[:80]!r} is not a plain decimal number") from None
        case tag:
            raise source.error(mark, path, f"the tag {tag!r} is not supported")


def read(path: Path, name: str | None = None) -> tuple[Node, Source]:
    """Read a file; MatrixInvalid if it can't be opened. *name* is how errors call it."""
    source = Source(name or str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise MatrixInvalid(
            f"{source.name}: can't be read: {exc.strerror or exc}", details={"file": source.name}
        ) from exc
    return parse(data, source), source
