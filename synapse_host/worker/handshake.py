"""Which HELLO a host accepts: the checks of protocol-v3 section 2, in its order. Pure."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from engines.protocol.messages import Hello
from synapse_host.errors import LaneRefused
from synapse_host.placement.spec import LaneSpec


@dataclass(frozen=True, slots=True)
class Peer:
    """What the kernel says about the process at the other end; None where the platform doesn't know."""

    uid: int | None
    pid: int | None


class HandshakeFault(Exception):
    """Our child (or its descendant) talked nonsense before the ACK: a protocol fault, one strike."""


def refused_release(spec: LaneSpec, loaded: str, installed: str) -> LaneRefused:
    """Return the deployment error of a host whose workers would come from another release than its own."""
    return LaneRefused(
        f"lane {spec.lane_id} starts no worker: version {installed} was installed under this host, "
        f"which runs {loaded}. Restart the host",
        details={"lane_id": spec.lane_id, "reason": "version", "expected": loaded, "observed": installed},
    )


def verify(
    hello: Hello, *, spec: LaneSpec, nonce: str, peer: Peer, uid: int | None, descends: bool, revision: str | None
) -> None:
    """Check a HELLO whose JSON, types and version are already right.

    *descends*: ``hello.pid`` is the child or a descendant of it. *revision*: the kernel revision of this lane's
    previous generation, if there was one. Raises HandshakeFault (a strike) or LaneRefused (a deployment error).
    """
    # Compared as bytes: compare_digest refuses non-ASCII text, which a peer may well send.
    if not hmac.compare_digest(hello.nonce.encode("utf-8", "surrogatepass"), nonce.encode()):
        raise HandshakeFault("HELLO carries the nonce of another spawn")
    if uid is not None and peer.uid is not None and peer.uid != uid:
        raise HandshakeFault(f"the worker runs as uid {peer.uid}, this host as {uid}")
    if peer.pid is not None and peer.pid != hello.pid:
        raise HandshakeFault(f"HELLO names pid {hello.pid}, the connection belongs to pid {peer.pid}")
    if not descends:
        raise HandshakeFault(f"HELLO names pid {hello.pid}, which is not a process of this spawn")
    if hello.engine.engine != spec.expected_engine:
        raise refusal(spec, "engine", spec.expected_engine, hello.engine.engine)
    if spec.owned:
        _verify_binding(hello, spec, revision)
    flags = hello.engine.build_flags
    device = flags.get("device") if isinstance(flags, dict) else None
    # A foreign worker that doesn't echo the device claims nothing; ours always echo it.
    if device != spec.device and (device is not None or spec.own_worker):
        raise refusal(spec, "device", spec.device, device)


def _verify_binding(hello: Hello, spec: LaneSpec, revision: str | None) -> None:
    # Spec: "Owned embed/rerank workers report their manifest digest and kernel revision", pinned or not.
    digest = hello.manifest_digest or None
    if digest is None or spec.manifest_digest not in (None, digest):
        raise refusal(spec, "manifest", spec.manifest_digest or "its digest", digest)
    observed = hello.kernel_revision or None
    if observed is None:
        raise refusal(spec, "kernel_revision", spec.kernel_revision or revision or "one", None)
    for expected in (spec.kernel_revision, revision):
        if expected is not None and observed != expected:
            raise refusal(spec, "kernel_revision", expected, observed)


_FIX = {
    "version": "install host and workers from the same release",
    "engine": "correct the engine or its worker command in the matrix",
    "device": "start the worker on the device the matrix names",
    "manifest": "give host and worker the same bundle",
    "kernel_revision": "re-certify this machine, or correct the pin in the matrix",
}


def refusal(spec: LaneSpec, reason: str, expected: Any, observed: Any) -> LaneRefused:
    """Return the deployment error of a well-formed HELLO from another worker than this lane's."""
    said = "nothing" if observed is None else repr(observed)
    fix = _FIX[reason] if observed is not None else f"use a worker that reports it in HELLO, or {_FIX[reason]}"
    return LaneRefused(
        f"lane {spec.lane_id} refuses its worker: {reason.replace('_', ' ')} is {said}, expected {expected!r}; "
        f"{fix}, then unload or reload the lane",
        details={"lane_id": spec.lane_id, "reason": reason, "expected": expected, "observed": observed},
    )
