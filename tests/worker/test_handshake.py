"""Which HELLO is accepted: every check of protocol-v3 section 2, alone and in order."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from engines.protocol.errors import VersionMismatch
from engines.protocol.messages import EngineInfo, Hello
from synapse_host.errors import LaneRefused
from synapse_host.placement.spec import LaneSpec, LoadSpec
from synapse_host.worker.handshake import HandshakeFault, Peer, refused_version, verify

NONCE = "0123456789abcdef"
DIGEST = "a" * 64


def spec(**changes) -> LaneSpec:
    base = LaneSpec(
        lane_id="l",
        model="m",
        kind="catalog",
        engine_id="cuda",
        expected_engine="owned-cuda",
        owned=True,
        device="cuda:0",
        command=("x",),
        load=LoadSpec("a", "d", "f"),
        manifest_digest=DIGEST,
    )
    return dataclasses.replace(base, **changes)


def hello(**changes) -> Hello:
    base = Hello(
        v=3,
        nonce=NONCE,
        engine=EngineInfo("owned-cuda", "1", {"device": "cuda:0"}),
        pid=42,
        max_frame=1024,
        manifest_digest=DIGEST,
        kernel_revision="r1",
    )
    return msgspec.structs.replace(base, **changes)


def check(h: Hello, s: LaneSpec | None = None, *, peer=Peer(1000, 42), descends=True, revision=None):  # noqa: B008
    verify(h, spec=s or spec(), nonce=NONCE, peer=peer, uid=1000, descends=descends, revision=revision)


def refusal(h: Hello, s: LaneSpec | None = None, **options) -> dict:
    with pytest.raises(LaneRefused) as caught:
        check(h, s, **options)
    assert caught.value.transient is False
    assert "unload or reload" in caught.value.message
    return caught.value.details


def test_the_right_worker_is_accepted():
    check(hello())
    check(hello(), spec(kernel_revision="r1"), revision="r1")
    check(hello(), peer=Peer(None, None))


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"nonce": "0123456789abcdee"}, {}, "nonce"),
        ({"nonce": ""}, {}, "nonce"),
        ({"nonce": "é" * 16}, {}, "nonce"),
        ({}, {"peer": Peer(1001, 42)}, "uid 1001"),
        ({"pid": 43}, {}, "pid 43"),
        ({}, {"descends": False}, "not a process of this spawn"),
        ({}, {"descends": False, "peer": Peer(None, None)}, "not a process of this spawn"),
    ],
)
def test_nonce_uid_and_pid_are_faults(changes, options, text):
    with pytest.raises(HandshakeFault, match=text):
        check(hello(**changes), **options)


def test_another_engine_is_refused():
    details = refusal(hello(engine=EngineInfo("llama.cpp-worker", "1", {"device": "cuda:0"})))
    assert details == {
        "lane_id": "l",
        "reason": "engine",
        "expected": "owned-cuda",
        "observed": "llama.cpp-worker",
    }


@pytest.mark.parametrize("observed", ["b" * 64, msgspec.UNSET])
def test_a_missing_or_different_manifest_is_refused(observed):
    details = refusal(hello(manifest_digest=observed))
    assert details["reason"] == "manifest" and details["expected"] == DIGEST
    assert details["observed"] == (None if observed is msgspec.UNSET else observed)


@pytest.mark.parametrize("observed", ["r2", msgspec.UNSET])
def test_kernel_revision_against_pin_and_against_the_last_generation(observed):
    assert refusal(hello(kernel_revision=observed), spec(kernel_revision="r1"))["reason"] == "kernel_revision"
    assert refusal(hello(kernel_revision=observed), revision="r1")["expected"] == "r1"


def test_the_manifest_is_told_before_the_kernel_revision():
    wrong = hello(manifest_digest="b" * 64, kernel_revision="r2")
    assert refusal(wrong, spec(kernel_revision="r1"))["reason"] == "manifest"


@pytest.mark.parametrize("left_out", ["manifest_digest", "kernel_revision"])
@pytest.mark.parametrize("observed", [msgspec.UNSET, ""])
def test_an_owned_worker_reports_both_also_where_nothing_is_pinned(left_out, observed):
    check(hello(), spec(manifest_digest=None))
    details = refusal(hello(**{left_out: observed}), spec(manifest_digest=None))
    assert details["reason"] == left_out.removesuffix("_digest") and details["observed"] is None


def test_a_worker_that_is_not_owned_is_never_bound():
    llama = hello(
        engine=EngineInfo("llama.cpp-worker", "1", {"device": "cpu"}),
        manifest_digest=msgspec.UNSET,
        kernel_revision=msgspec.UNSET,
    )
    check(llama, spec(expected_engine="llama.cpp-worker", owned=False, device="cpu", kernel_revision="r9"))


def test_another_device_is_refused():
    details = refusal(hello(engine=EngineInfo("owned-cuda", "1", {"device": "cpu"})))
    assert (details["reason"], details["expected"], details["observed"]) == ("device", "cuda:0", "cpu")


def test_a_missing_device_echo_is_refused_from_our_own_workers_only():
    silent = hello(engine=EngineInfo("owned-cuda", "1"))
    assert refusal(silent)["observed"] is None
    check(silent, spec(own_worker=False))


def test_order_nonce_before_engine_and_pid_before_engine():
    other = EngineInfo("x", "1")
    with pytest.raises(HandshakeFault, match="nonce"):
        check(hello(engine=other, nonce="bad", pid=7))
    with pytest.raises(HandshakeFault, match="pid"):
        check(hello(engine=other, pid=7))


def test_another_version_is_a_refusal():
    error = refused_version(spec(), VersionMismatch(2, 3))
    assert error.details == {"lane_id": "l", "reason": "version", "expected": 3, "observed": 2}


def test_a_worker_that_reports_nothing_is_told_as_nothing():
    with pytest.raises(LaneRefused, match="manifest is nothing, expected"):
        check(hello(manifest_digest=msgspec.UNSET))
    with pytest.raises(LaneRefused, match="kernel revision is 'r1', expected 'r2'"):
        check(hello(), revision="r2")
