"""Which HELLO is accepted: every check of protocol-v3 section 2, alone and in order."""

from __future__ import annotations

import msgspec
import pytest

from engines.protocol.messages import EngineInfo, Hello
from synapse_host.errors import LaneRefused
from synapse_host.placement.spec import LaneSpec
from synapse_host.worker.handshake import HandshakeFault, Peer, verify
from tests.support.lanes import lane

NONCE = "0123456789abcdef"
DIGEST = "a" * 64


def spec(**changes) -> LaneSpec:
    base = {"expected_engine": "owned-cuda", "owned": True, "device": "cuda:0", "manifest_digest": DIGEST}
    return lane(**{**base, **changes})


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


def test_a_worker_that_is_not_owned_is_never_bound():
    llama = hello(
        engine=EngineInfo("llama.cpp-worker", "1", {"device": "cpu"}),
        manifest_digest=msgspec.UNSET,
        kernel_revision=msgspec.UNSET,
    )
    check(llama, spec(expected_engine="llama.cpp-worker", owned=False, device="cpu", kernel_revision="r9"))


UNSET = msgspec.UNSET
OTHER = EngineInfo("llama.cpp-worker", "1", {"device": "cuda:0"})
ELSEWHERE = EngineInfo("owned-cuda", "1", {"device": "cpu"})
SILENT = EngineInfo("owned-cuda", "1")
B = "b" * 64


@pytest.mark.parametrize(
    ("changes", "pins", "revision", "reason", "expected", "observed"),
    [
        ({"engine": OTHER}, {}, None, "engine", "owned-cuda", "llama.cpp-worker"),
        ({"manifest_digest": B}, {}, None, "manifest", DIGEST, B),
        ({"manifest_digest": UNSET}, {}, None, "manifest", DIGEST, None),
        ({"manifest_digest": ""}, {"manifest_digest": None}, None, "manifest", "its digest", None),
        ({"manifest_digest": B, "kernel_revision": "r2"}, {"kernel_revision": "r1"}, None, "manifest", DIGEST, B),
        ({"kernel_revision": "r2"}, {"kernel_revision": "r1"}, None, "kernel_revision", "r1", "r2"),
        ({"kernel_revision": UNSET}, {"kernel_revision": "r1"}, None, "kernel_revision", "r1", None),
        ({"kernel_revision": "r2"}, {}, "r1", "kernel_revision", "r1", "r2"),
        ({"kernel_revision": UNSET}, {}, "r1", "kernel_revision", "r1", None),
        ({"kernel_revision": ""}, {"manifest_digest": None}, None, "kernel_revision", "one", None),
        ({"engine": ELSEWHERE}, {}, None, "device", "cuda:0", "cpu"),
        ({"engine": ELSEWHERE}, {"own_worker": False}, None, "device", "cuda:0", "cpu"),
        ({"engine": SILENT}, {}, None, "device", "cuda:0", None),
    ],
)
def test_a_deployment_error_names_reason_expected_and_observed(changes, pins, revision, reason, expected, observed):
    with pytest.raises(LaneRefused) as caught:
        check(hello(**changes), spec(**pins), revision=revision)
    error = caught.value
    assert error.details == {"lane_id": "toy", "reason": reason, "expected": expected, "observed": observed}
    said = "nothing" if observed is None else repr(observed)
    assert f"{reason.replace('_', ' ')} is {said}, expected {expected!r}" in error.message
    assert not error.transient and error.message.endswith("then unload or reload the lane")


def test_a_foreign_worker_that_echoes_no_device_claims_nothing():
    check(hello(engine=SILENT), spec(own_worker=False))


def test_a_fault_comes_before_a_refusal():
    with pytest.raises(HandshakeFault, match="nonce"):
        check(hello(engine=OTHER, nonce="bad", pid=7))
    with pytest.raises(HandshakeFault, match="pid"):
        check(hello(engine=OTHER, pid=7))
