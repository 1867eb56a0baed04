"""The wire vectors, run against both ends, whole, byte by byte and in random cuts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import messages
from engines.protocol.connection import Connection
from engines.protocol.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.messages import DEFAULT_MAX_FRAME, Phase, Pooling
from engines.protocol.rules import Event, PeerClosed, ReplyReceived, ReplyStarted, RequestReceived, Role, State
from tests.support.pair import Cut, byte_by_byte, joined, random_cuts, receive, whole

FOLDER = Path(__file__).parent.parent / "vectors"
GROUPS = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]
VECTORS = [(f"{group['group']}/{vector['name']}", vector) for group in GROUPS for vector in group["vectors"]]
CUTS: dict[str, Cut] = {
    "whole": whole,
    "bytes": byte_by_byte,
    "random-1": random_cuts(1),
    "random-2": random_cuts(2),
    "random-3": random_cuts(3),
}
MESSAGES = (*messages.REPLY_TO, *messages.REPLY_TO.values(), messages.Err, messages.Progress, messages.Shutdown)
TYPES = {messages.type_name(kind): kind for kind in MESSAGES}
EVENTS: dict[str, type[Event]] = {
    "hello_received": messages.Hello,
    "ack_received": messages.HelloAck,
    "request_received": RequestReceived,
    "shutdown_received": messages.Shutdown,
    "progress_received": messages.Progress,
    "reply_received": ReplyReceived,
    "peer_closed": PeerClosed,
}


def _enum(kind: Callable[[Any], Any], value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return value


def build(fields: dict[str, Any]) -> Any:
    """Build our message from its JSON without validating it: a sender may be asked to send nonsense."""
    made = {key: value for key, value in fields.items() if key != "type"}
    if "items" in made:
        made["items"] = [messages.Item(**item) for item in made["items"]]
    for key in ("candidates", "sequences"):
        if key in made:
            made[key] = [messages.Segment(**segment) for segment in made[key]]
    if "inventory" in made:
        found = made["inventory"]
        executables = [messages.Executable(**executable) for executable in found["executables"]]
        made["inventory"] = messages.Inventory(executables=executables, cpu_stages=found["cpu_stages"])
    for key, kind in (
        ("pooling", Pooling),
        ("phase", Phase),
        ("code", ErrorCode),
        ("finish_reason", messages.FinishReason),
    ):
        if key in made:
            made[key] = _enum(kind, made[key])
    if "engine" in made:
        made["engine"] = messages.EngineInfo(**made["engine"])
    if "packed" in made:
        made["packed"] = messages.PackedCapability(**made["packed"])
    if "type" in fields:
        return TYPES[fields["type"]](**made)
    return messages.Hello(**made) if "nonce" in made else messages.HelloAck(**made)


def snapshot(connection: Connection) -> tuple[object, ...]:
    return (
        connection.state,
        connection.max_frame,
        connection.engine,
        connection.expectation.request,
        connection.expectation.completed,
        connection.expectation.phase,
        connection.mid_frame,
    )


def feed(connection: Connection, data: bytes, cut: Cut) -> list[Event]:
    """Feed *data*; ReplyStarted depends on where the stream was cut and is no part of a vector."""
    events: list[Event] = []
    for piece in cut(data):
        events += [event for event in receive(connection, piece) if not isinstance(event, ReplyStarted)]
    return events


def check_events(step: dict[str, Any], events: list[Event]) -> None:
    assert [type(event) for event in events] == [EVENTS[name] for name in step["events"]]
    for event in events:
        if isinstance(event, RequestReceived | ReplyReceived):
            message = event.request if isinstance(event, RequestReceived) else event.reply
            assert message == build(step["json"])
            assert (None if event.payload is None else bytes(event.payload).hex()) == step.get("raw")
        elif not isinstance(event, PeerClosed):
            assert event == build(step["json"])


def run_vector(vector: dict[str, Any], role: Role, cut: Cut) -> None:
    limit = vector.get(f"{role.value}_max_frame", DEFAULT_MAX_FRAME)
    connection = Connection(role, max_frame=limit)
    for step in vector["steps"]:
        data = bytes.fromhex("".join(step.get("frames", [])))
        if step["from"] == role.value:
            if step["sender"] == "impossible":
                return
            message = build(step["json"])
            payload = bytes.fromhex(step["raw"]) if "raw" in step else None
            if step["sender"] == "local_error":
                before = snapshot(connection)
                with pytest.raises(LocalProtocolError):
                    connection.send(message, payload)
                assert snapshot(connection) == before
                return
            sent = joined(connection.send(message, payload))
            if step.get("canonical", True):
                assert sent.hex() == data.hex()
            continue
        if step.get("eof"):
            if step["receiver"] == "ok":
                check_events(step, [connection.receive_eof()])
                assert connection.state is State.CLOSED
                continue
            with pytest.raises(RemoteProtocolError):
                connection.receive_eof()
        elif step["receiver"] in ("ok", "pending"):
            check_events(step, feed(connection, data, cut))
            assert connection.state is not State.CLOSED or step["events"] != []
            continue
        else:
            expected = VersionMismatch if step["receiver"] == "version_mismatch" else RemoteProtocolError
            with pytest.raises(RemoteProtocolError) as caught:
                feed(connection, data, cut)
            assert type(caught.value) is expected
        # Once: whatever comes later is neither an event nor another error.
        assert connection.state is State.CLOSED
        assert feed(connection, data * 2, cut) == []
        assert connection.next_event() is None
        connection.receive_eof()
        with pytest.raises(LocalProtocolError):
            connection.send(messages.Shutdown())
        return


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["group"])
def test_vectors(group: dict[str, Any], role: Role, cut: Cut) -> None:
    for vector in group["vectors"]:
        try:
            run_vector(vector, role, cut)
        except BaseException as exc:
            exc.add_note(f"vector {group['group']}/{vector['name']}: {vector['rule']}")
            raise


def test_every_message_and_every_code_occurs() -> None:
    assert len(VECTORS) >= 80
    seen: set[str] = set()
    codes: set[str] = set()
    for _, vector in VECTORS:
        for step in vector["steps"]:
            if step["sender"] == step["receiver"] == "ok":
                seen.add(step["json"].get("type", "HELLO" if "nonce" in step["json"] else "HELLO_ACK"))
                codes.add(step["json"].get("code", ""))
    assert seen == {*TYPES, "HELLO", "HELLO_ACK"}
    assert codes - {""} == {code.value for code in ErrorCode}
