"""What every message has in common, read off the legal wire vectors, and the tables that describe an exchange.

The exact bytes of each message and single refusals are the vectors' (test_vectors.py).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engines.protocol import messages as m
from engines.protocol.decoding import decode_from_host, decode_from_worker
from engines.protocol.errors import EngineError, ErrorCode
from tests.protocol.test_vectors import VECTORS

LEGAL: dict[str, dict[str, Any]] = {
    json.dumps(step["json"]): step
    for _, vector in VECTORS
    for step in vector["steps"]
    if step["sender"] == step["receiver"] == "ok" and "type" in step.get("json", ())
}
DECODE = {"host": decode_from_host, "worker": decode_from_worker}


@pytest.mark.parametrize("kind", sorted({step["json"]["type"] for step in LEGAL.values()}))
def test_fields_are_exact_and_each_end_has_its_own_messages(kind: str) -> None:
    """An unknown field, a null, and the other end's decoder are refused; an optional field is left out, never null."""
    for step in LEGAL.values():
        fields, sender = step["json"], step["from"]
        if fields["type"] != kind:
            continue
        message = DECODE[sender](json.dumps(fields).encode())
        other = DECODE["worker" if sender == "host" else "host"]
        with pytest.raises(msgspec.ValidationError):
            other(json.dumps(fields).encode())
        names = [*fields, *type(message).__struct_fields__]
        inner = {name: value[0] if isinstance(value, list) and value else value for name, value in fields.items()}
        strange = {name: {**value, "surprise": 1} for name, value in inner.items() if isinstance(value, dict)}
        nested = ({name: [value] if isinstance(fields[name], list) else value} for name, value in strange.items())
        for wrong in ({"surprise": 1}, *nested, *({name: None} for name in names)):
            with pytest.raises(msgspec.ValidationError):
                DECODE[sender](json.dumps(fields | wrong).encode())


def test_an_error_can_always_be_sent() -> None:
    error = EngineError(ErrorCode.ARTIFACT_INVALID, "can't open /models/\udcff.gguf")
    assert str(error) == "artifact_invalid: can't open /models/\\udcff.gguf"
    assert b"udcff" in m.encode(m.Err(code=error.code, msg=error.msg))
