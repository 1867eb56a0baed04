from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.protocol.errors import ErrorCode
from synapse_host import errors
from synapse_host.errors import WORKER_ERRORS, EngineCrashed, InvalidRequest, QueueFull, SynapseError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, SynapseError) and "code" in vars(value)
]


def test_absent_values_are_left_out_of_the_document() -> None:
    assert InvalidRequest("no").to_dict() == {
        "code": "invalid_request",
        "class": "permanent",
        "safe_to_retry_same_request": False,
        "message": "no",
        "details": {},
    }
    assert QueueFull("full", details={"waiting": 3}).to_dict() == {
        "code": "queue_full",
        "class": "transient",
        "retry_after_ms": 100,
        "safe_to_retry_same_request": True,
        "message": "full",
        "details": {"waiting": 3},
    }


def test_a_given_delay_replaces_the_default_also_when_it_is_zero() -> None:
    assert EngineCrashed("x").to_dict()["retry_after_ms"] == 250
    assert EngineCrashed("x", retry_after_ms=431_000).to_dict()["retry_after_ms"] == 431_000
    assert EngineCrashed("x", retry_after_ms=0).to_dict()["retry_after_ms"] == 0


def test_only_a_quarantined_crash_has_an_exit_code_of_its_own() -> None:
    assert EngineCrashed("x").exit_code == EngineCrashed("x", details={"quarantined": False}).exit_code == 1
    assert EngineCrashed("x", details={"quarantined": True}).exit_code == 3


def test_every_code_a_worker_may_send_has_a_class() -> None:
    assert set(WORKER_ERRORS) == set(ErrorCode)
    assert all(WORKER_ERRORS[code].code == code.value for code in ErrorCode)


def test_a_full_disk_is_no_mistake_of_the_caller() -> None:
    full = errors.of_os(OSError(errno.ENOSPC, "No space left on device"), "x", otherwise=InvalidRequest)
    assert (full.code, full.exit_code) == ("storage_full", 1)
    other = errors.of_os(OSError(errno.EACCES, "Permission denied"), "x", otherwise=InvalidRequest)
    assert (other.code, other.exit_code) == ("invalid_request", 2)


def test_each_place_has_its_own_words() -> None:
    error = QueueFull("It is full.", advice={"python": "Wait.", "operator": "synapse ps"})
    assert (str(error), error.message) == ("It is full. Wait.", "It is full. Wait.")
    assert (error.said("operator"), error.said("command")) == ("It is full. synapse ps", "It is full.")
    assert error.to_dict("operator")["message"] == "It is full. synapse ps"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_a_document_says_what_its_class_says(error: type[SynapseError]) -> None:
    document = error("why").to_dict()
    assert document["class"] == ("transient" if error.transient else "permanent")
    assert document["safe_to_retry_same_request"] is error.safe_to_retry
    # A time to wait goes with what time may cure, and only with that.
    assert ("retry_after_ms" in document) <= error.transient


@pytest.mark.parametrize(
    "value",
    [b"name", "x" * 2**21, ["x"] * 2**21, ["x" * 2**11] * 2**11, {"x" * 9_000: {"x" * 9_000: [b"\xff"]}}, "\ud800",
     {b"a": 1}, Path("a"), 2**80, 10**5000, {1, 2}, [[[[[[[[[[[[1]]]]]]]]]]]], object, float("nan"), np.int64(5)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_an_error_tells_is_bounded_json(value: Any) -> None:
    error = InvalidRequest("no", details={"value": value})
    document = json.dumps(error.to_dict()).encode()
    assert len(document) < 400_000
    json.dumps(error.to_dict(), ensure_ascii=False, allow_nan=False).encode()


def test_a_worker_s_endless_message_keeps_its_beginning_and_its_end() -> None:
    error = WORKER_ERRORS[ErrorCode.CONFIG_INVALID]("begins " + "x" * 60_000_000 + " ends")
    assert error.message.startswith("begins x") and error.message.endswith("x ends")
    assert len(error.message) < 4200 and str(error) == error.message
    assert "characters left out" in error.message
    assert InvalidRequest("half \ud800 of a pair").message == r"half \ud800 of a pair"
