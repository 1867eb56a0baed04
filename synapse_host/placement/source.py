"""A YAML file whose values keep their places, and its conversion to Structs with errors that name the place.

:func:`read` gives plain data only: no tags that make objects, no anchors and merge keys, no numbers that YAML 1.1
alone has. msgspec checks it against the types of :mod:`synapse_host.placement.matrix`, which are the one schema;
:meth:`Source.convert` turns its error into ``file:line:column: key.path: what``. msgspec writes ``[...]`` where its
path goes through a mapping of free names; the entry is found by converting each one alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from engines.bundle.manifest import read_plain
from synapse_host.errors import MatrixInvalid

if TYPE_CHECKING:
    import yaml

MAX_BYTES: Final = 256 * 1024
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = {_TAG + kind for kind in ("map", "seq", "str", "bool", "int", "float", "null", "timestamp", "merge")}
_KEYS: Final = {"bool": "YAML reads this key as a boolean", "merge": "merge keys (<<) are not supported"}
_DECIMAL: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,18})(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?")

_WORDS: Final = {
    **{"str": "a word", "int": "a whole number", "float": "a number", "bool": "true or false", "null": "nothing"},
    **{"array": "a list", "object": "a mapping"},
}
"""What people call the types that msgspec names."""

Keys: TypeAlias = tuple[str | int, ...]
"""The way to a value: keys of mappings and places in lists."""
T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what an error says of an unknown name: the nearest known one, or all of them."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else f"; known: {', '.join(known)}"


@dataclass(frozen=True, slots=True)
class Source:
    """One file as errors call it, its plain data, and the YAML library's nodes, which know their places."""

    name: str
    plain: Any
    root: yaml.Node

    def error(self, what: str, keys: Keys = (), *, of_key: bool = False) -> MatrixInvalid:
        """Return the error ``file:line:column: key.path: what`` at a value, or at the key that it has."""
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
        key, value = self._nodes(keys)
        return _invalid(self.name, (key if of_key else value).start_mark, what, path)

    def line(self, *keys: str) -> int:
        """Return the line that a key is written in, counted from 1."""
        return int(self._nodes(keys)[0].start_mark.line) + 1

    def convert(self, type: type[T]) -> T:
        """Return the data as *type*, a Struct. MatrixInvalid names the place and the nearest right name."""
        try:
            return msgspec.convert(self.plain, type)
        except msgspec.ValidationError as exc:
            raise self._explained(str(exc), type) from exc

    def _nodes(self, keys: Keys) -> tuple[yaml.Node, yaml.Node]:
        """Return the nodes of the last key and of its value; the nearest ones above for what isn't in the file."""
        key = value = self.root
        for name in keys:
            if isinstance(name, int):
                key = value = value.value[name]
                continue
            found = [pair for pair in value.value if pair[0].value == name]
            if not found:
                break
            key, value = found[0]
        return key, value

    def _explained(self, message: str, type: type[Any]) -> MatrixInvalid:
        what, _, path = message.partition(" - at ")
        keys = self._keys(message, type, path.replace("`", "").removeprefix("key in ").removeprefix("$"))
        rule = _rule(type, keys)
        if path.startswith("`key`"):
            return self.error(f"the name {keys[-1]!r} must match {what.rpartition('regex ')[2]}", keys, of_key=True)
        if name := re.search(r"unknown field `(.*)`$", what, re.DOTALL):
            return self.error(f"unknown key{nearest(name[1], rule['properties'])}", (*keys, name[1]), of_key=True)
        if name := re.search(r"missing required field `(.*)`$", what):
            return self.error("is missing", (*keys, name[1]))
        node = self._nodes(keys)[1]
        if what.startswith("Invalid enum value"):
            known = nearest(node.value, [str(one) for one in rule["enum"]])
            return self.error(f"unknown value {node.value!r}{known}", keys)
        if what.startswith("Expected `str") and node.tag.removeprefix(_TAG) in ("bool", "int", "float"):
            why = f"YAML reads {node.value} as a boolean" if node.tag == f"{_TAG}bool" else "must be text"
            return self.error(f'{why}; write it in quotes: "{node.value}"', keys)
        said = re.sub(r"`([^`]*)`", lambda found: _in_yaml(found[1]), what).replace("Expected ", "must be ")
        example = f", such as {rule['examples'][0]!r}" if "examples" in rule else ""
        return self.error(said + example + (f"; it is {node.value!r}" if isinstance(node.value, str) else ""), keys)

    def _keys(self, message: str, type: type[Any], path: str) -> Keys:
        """Return the way to the fault that msgspec reports; a mapping's entry is the one that gives the same alone."""
        keys: list[str | int] = []
        steps = re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", path)
        if " - at `key` in " in message:
            steps.append(("", "", "key"))
        for name, index, _ in steps:
            if name or index:
                keys.append(name or int(index))
                continue
            for entry in _at(self.plain, keys):
                try:
                    msgspec.convert(_only(self.plain, keys, entry), type)
                except msgspec.ValidationError as exc:
                    if str(exc) == message:
                        keys.append(entry)
                        break
        return tuple(keys)


def _in_yaml(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | ") if name != "null" or types == "null")


def _at(plain: Any, keys: Iterable[str | int]) -> Any:
    for key in keys:
        plain = plain[key]
    return plain


def _only(plain: Any, keys: list[str | int], entry: str) -> Any:
    """Return the data with one entry alone in the mapping at *keys*."""
    if not keys:
        return {entry: plain[entry]}
    inner = _only(plain[keys[0]], keys[1:], entry)
    if isinstance(plain, dict):
        return {**plain, keys[0]: inner}
    return [inner if place == keys[0] else value for place, value in enumerate(plain)]


def _rule(type: type[Any], keys: Keys) -> dict[str, Any]:
    """Return what the JSON Schema of *type* says at *keys*, with all its alternatives in one."""
    schema = msgspec.json.schema(type)

    def whole(rule: dict[str, Any]) -> dict[str, Any]:
        parts = [whole(part) for part in rule.get("anyOf", ())]
        if "$ref" in rule:
            parts.append(whole(schema["$defs"][rule["$ref"].rpartition("/")[2]]))
        return {key: value for part in (*parts, rule) for key, value in part.items()}

    rule = whole(schema)
    for key in keys:
        inner = rule.get("items") if isinstance(key, int) else rule.get("properties", {}).get(key)
        rule = whole(inner or rule.get("additionalProperties") or {})
    return rule


def _invalid(name: str, mark: Any, what: str, path: str = "") -> MatrixInvalid:
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    place = f"{path}: " if path else ""
    return MatrixInvalid(
        f"{name}:{line}:{column}: {place}{what}",
        details={"file": name, "line": line, "column": column, "key": path},
    )


def read(path: Path, name: str | None = None) -> Source:
    """Read a file; MatrixInvalid if it can't be opened or isn't plain YAML. *name* is how errors call it."""
    import yaml

    name = name or str(path)
    try:
        text = read_plain(path, MAX_BYTES).decode()
        loader = _loader(text)
        root = loader.get_single_node()
        if root is None:
            raise _invalid(name, None, "the file is empty; the shortest valid one starts with 'version: 1'")
        return Source(name, loader.construct_document(root), root)
    except OSError as exc:
        raise MatrixInvalid(f"{name}: can't be read: {exc.strerror or exc}", details={"file": name}) from exc
    except UnicodeDecodeError as exc:
        raise _invalid(name, None, f"not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise _invalid(name, mark, f"not valid YAML: {exc.problem or exc.context}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise _invalid(name, None, f"not valid YAML: {exc}") from exc


def _loader(text: str) -> Any:
    """Return a YAML loader that refuses what is no plain data, or not what it looks like."""
    import yaml

    def refused(what: str, node: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise refused("anchors and aliases are not supported here; write the value out", event)
            node = super().compose_node(parent, index)
            assert node is not None, "the document has a root"
            if node.tag not in _TAGS:
                raise refused(f"the tag {node.tag!r} is not supported", node)
            if isinstance(node, yaml.ScalarNode):
                self._check(node)
            elif isinstance(node, yaml.MappingNode):
                self._check_keys(node)
            return node

        def _check(self, node: yaml.ScalarNode) -> None:
            if node.tag == f"{_TAG}timestamp":
                node.tag = f"{_TAG}str"
            if node.tag in (f"{_TAG}int", f"{_TAG}float") and not _DECIMAL.fullmatch(node.value):
                # 0x10, 0o17, 1:30, .inf: YAML 1.1 has more numbers than a reader expects.
                raise refused(f"{node.value[:80]!r} is not a plain decimal number", node)

        def _check_keys(self, node: yaml.MappingNode) -> None:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if key.tag != f"{_TAG}str":
                    why = _KEYS.get(key.tag.removeprefix(_TAG), "a key must be a word")
                    quoted = f'; write it in quotes: "{key.value}"' if isinstance(key.value, str) else ""
                    raise refused(why + quoted, key)
                if key.value in lines:
                    raise refused(f"the key {key.value!r} occurs twice (first in line {lines[key.value]})", key)
                lines[key.value] = key.start_mark.line + 1

    return Plain(text)
