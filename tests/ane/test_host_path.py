"""The host's supervisor, the fleet's leases, a real worker process, a real package: rows in, vectors out.

The evaluator's engine name is accepted because this test passes it to the lane; no matrix key, variable or flag can.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.bundle.manifest import Bundle
from engines.protocol.messages import Vectors
from synapse_host.errors import LaneRefused
from synapse_host.residency.lane import AneFleet
from tests.ane.make_goldens import GOLDENS, rows
from tests.support.lanes import embed, lanes_in
from tests.support.mil_reference import ENGINE

pytestmark = pytest.mark.process


def lane_fields(bundle: Bundle, expected: str) -> dict[str, object]:
    from synapse_host.placement.spec import LoadSpec

    (artifact,) = bundle.artifacts("coreml")
    return {
        "expected_engine": expected,
        "owned": True,
        "device": "ane",
        "command": (sys.executable, "-m", "tests.support.ane_worker"),
        "load": LoadSpec(str(bundle.path(artifact.path)), artifact.digest, "mlpackage"),
        "cwd": Path(__file__).parents[2],
        "manifest_path": bundle.path("manifest.json"),
        "manifest_digest": bundle.digest,
    }


def test_mixed_rows_through_the_host(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    bundle = bundles("bert")
    (artifact,) = bundle.artifacts("coreml")
    found = [row.tolist() for row in rows("bert")]
    done: dict[str, object] = {}

    async def main() -> dict[str, object]:
        async with lanes_in(tmp_path / "rt") as made:
            supervisor = made(**lane_fields(bundle, ENGINE))  # type: ignore[arg-type]
            fleet = AneFleet()
            lane = fleet.add(supervisor, artifact)
            try:
                # One request over three rungs, as the host makes it; and one row of it alone.
                reply, raw = await lane.submit(embed(*found, normalize=True), stage="embed")
                done["reply"], done["vectors"] = reply, np.asarray(raw).reshape(len(found), 64)
                _, alone = await lane.submit(embed(found[5], normalize=True), stage="embed")
                done["alone"] = np.asarray(alone)
                await supervisor.ping()
                return supervisor.health()
            finally:
                await fleet.aclose()

    health = asyncio.run(main())
    reply, vectors = done["reply"], done["vectors"]
    assert isinstance(reply, Vectors) and (reply.n, reply.dims) == (len(found), 64)
    assert isinstance(vectors, np.ndarray) and np.array_equal(vectors[5], done["alone"])  # type: ignore[arg-type]
    assert (vectors.astype(np.float64) * np.load(GOLDENS)["bert"]).sum(1).min() >= 0.999
    assert health["generation"] == 1
    assert health.get("placement_share") is None, "no share, so certification can't pass with it"


def test_a_lane_that_expects_the_production_engine_refuses_the_evaluator(
    bundles: Callable[[str], Bundle], tmp_path: Path
) -> None:
    async def main() -> None:
        async with lanes_in(tmp_path / "rt") as made:
            supervisor = made(**lane_fields(bundles("bert"), "ane-coreml-worker"))  # type: ignore[arg-type]
            with pytest.raises(LaneRefused) as refused:
                await supervisor.load()
            assert refused.value.details["reason"] == "engine"

    asyncio.run(main())
