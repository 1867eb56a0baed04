"""``docs/protocol.md`` says what the code does: its tables are read and compared, its diagram is made of the code.

python -m tests.protocol.test_document      writes the diagram anew, after a change of the transition table
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT

from engines.protocol import messages as m
from engines.protocol.rules import TRANSITIONS, State
from synapse_host.config import Windows

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = DOCUMENT.read_text("utf-8")
OBJECTS = (m.Item, m.Segment, m.Inventory, m.Executable, m.EngineInfo, m.PackedCapability)
ENUMS = (m.Pooling, m.Phase, m.FinishReason)
HOST = (*m.REPLY_TO, m.Shutdown)
WORKER = (m.Progress, *dict.fromkeys(m.REPLY_TO.values()), m.Err)


def table(first: str, text: str = TEXT) -> list[list[str]]:
    """Return the rows of the one table whose first column is headed *first*."""
    found = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[- |]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} tables start with {first!r}"
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in found[0].splitlines()]


def word(kind: msgspec.inspect.Type) -> str:
    """Return the document's word for a type of ours."""
    match kind:
        case msgspec.inspect.IntType(ge=0, le=255):
            return "u8"
        case msgspec.inspect.IntType(ge=0, le=m.U32_MAX):
            return "u32"
        case msgspec.inspect.IntType(ge=0, le=None):
            return "u64"
        case msgspec.inspect.StrType(min_length=1, max_length=64):
            return "id"
        case msgspec.inspect.StrType(min_length=None):
            return "str"
        case msgspec.inspect.BoolType():
            return "bool"
        case msgspec.inspect.FloatType():
            return "f64"
        case msgspec.inspect.ListType():
            return f"list({word(kind.item_type)})"
        case msgspec.inspect.DictType():
            return f"map({word(kind.key_type)}, {word(kind.value_type)})"
        case msgspec.inspect.EnumType() | msgspec.inspect.StructType():
            return kind.cls.__name__
        case msgspec.inspect.UnionType():
            (one,) = [item for item in kind.types if not _unset(item)]
            return word(one)
    raise AssertionError(f"no word for {kind}")


def _unset(kind: msgspec.inspect.Type) -> bool:
    return isinstance(kind, msgspec.inspect.CustomType) or "Unset" in type(kind).__name__


def fields(kind: type[msgspec.Struct]) -> str:
    """Return the fields of a Struct in the document's notation, without the ``req_id`` that it names once."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    found = []
    for field in described.fields:
        if field.name == "req_id":
            continue
        if field.required:
            mark = ""
        else:
            # msgspec leaves UNSET out of its description: no default, yet not required.
            mark = "?" if field.default is NODEFAULT and field.default_factory is NODEFAULT else "="
        found.append(f"{field.encode_name}{mark} {word(field.type)}")
    return ", ".join(found)


def render(text: str) -> str:
    """Return *text* with the transition table as a Mermaid state diagram in its one place."""
    arrows = [
        f"    {state.name} --> {following.name}: {role.value} {kind.value}"
        for (state, role, kind), following in TRANSITIONS.items()
    ]
    start, end = f"    [*] --> {State.HELLO.name}", f"    {State.CLOSED.name} --> [*]"
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", start, *arrows, end, "```"])
    pattern = r"(<!-- generated: diagram -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda found: f"{found[1]}{diagram}\n{found[2]}", text, flags=re.DOTALL)
    assert count == 1, f"docs/protocol.md has {count} places for the diagram"
    return text


def test_the_diagram_is_fresh() -> None:
    """If this fails: ``python -m tests.protocol.test_document``."""
    assert render(TEXT) == TEXT


def listing(before: str) -> list[str]:
    """Return the lines of the indented block that follows the words *before*."""
    return [line[4:] for line in TEXT.split(f"{before}\n\n")[1].split("\n\n")[0].splitlines()]


def line(kind: type[m.Message]) -> str:
    """Return the document's line of a message: its fields, its raw frame, its answer."""
    raw = {None: "", "<i4": " + i32", "<f4": " + f32"}[kind.payload]
    answer: Any = m.REPLY_TO.get(kind)  # type: ignore[call-overload]
    return f"{m.type_name(kind)}({fields(kind)}){raw}" + (f" -> {m.type_name(answer)}" if answer else "")


def test_messages() -> None:
    assert sorted(listing("The host sends")) == sorted(map(line, HOST))
    assert sorted(listing("and the worker")) == sorted(map(line, WORKER))
    assert [kind for kind in (*HOST, *WORKER) if "req_id" not in kind.__struct_fields__] == [m.Shutdown]


def test_handshake() -> None:
    assert listing("in the notation of section 4:") == [f"HELLO({fields(m.Hello)})", f"HELLO_ACK({fields(m.HelloAck)})"]


def test_objects_and_words() -> None:
    words = [f"{kind.__name__} = {' | '.join(member.value for member in kind)}" for kind in ENUMS]
    objects = [f"{kind.__name__}({fields(kind)})" for kind in OBJECTS]
    assert listing("where") == [f"id = string of 1 to {m.MAX_IDENTIFIER_BYTES} bytes", *objects, *words]


def test_phases_and_windows() -> None:
    windows = Windows()
    seconds = {m.Phase.SETUP: windows.setup, m.Phase.CONTROL: windows.control, m.Phase.INFERENCE: windows.inference}
    expected = []
    for kind in m.REPLY_TO:
        plain, cuda = m.phases(kind, ""), m.phases(kind, m.CUDA_ENGINE)
        for engine, phases in (("any", plain),) if plain == cuda else (("others", plain), (m.CUDA_ENGINE, cuda)):
            limits = [windows.ping] if kind is m.Ping else [seconds[phase] for phase in phases]
            expected.append([m.type_name(kind), engine, ", ".join(phases), ", ".join(f"{limit:g}" for limit in limits)])
    listed = [[kind, *row[1:]] for row in table("exchange") for kind in row[0].split(", ")]
    assert sorted(listed) == sorted(expected)


def test_limits_and_names() -> None:
    for limit in (
        f"`max_frame`: {m.DEFAULT_MAX_FRAME} by default and at most; HELLO and HELLO_ACK {m.HELLO_MAX_FRAME},",
        f"HELLO: at most {m.MAX_NESTING} levels",
        f"A request: at most {m.MAX_ITEMS} items, candidates or sequences",
    ):
        assert limit in TEXT
    assert f"`v` is {m.VERSION}, exactly" in TEXT and f"version {m.VERSION}\n" in TEXT
    for engine in (m.LLAMA_ENGINE, m.ANE_ENGINE, m.CUDA_ENGINE):
        assert f"`{engine}`" in TEXT


if __name__ == "__main__":
    DOCUMENT.write_text(render(TEXT), "utf-8")
