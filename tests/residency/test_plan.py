"""Which function runs which rows, and what a function is charged."""

from __future__ import annotations

import msgspec
import pytest

from engines.bundle.manifest import Artifact, Function
from synapse_host.errors import BundleInvalid, SequenceTooLong
from synapse_host.residency.plan import Costs, Part, charge, parts
from synapse_host.residency.types import Model

ARTIFACT = Artifact(
    format="coreml",
    path="m.mlpackage",
    digest="sha256:" + "0" * 64,
    dtype="f16",
    bytes=1000,
    layers=22,
    functions=[Function(f"s{n}", bucket=n) for n in (128, 256, 512)] + [Function("packed256", packed_width=256)],
)
COSTS = Costs({128: 3.5, 256: 9.0, 512: 25.4}, {256: 4.0})


def test_rungs_ascend_and_a_row_beyond_the_ladder_is_named() -> None:
    groups = [(128, (1, 2)), (256, (3,)), (512, (0,))]
    assert parts([300, 5, 128, 129], [512, 128, 256]) == [Part("shape", *group) for group in groups]
    with pytest.raises(SequenceTooLong) as refused:
        parts([5, 513], [128, 512])
    assert refused.value.details == {"index": 1, "tokens": 513, "max_tokens": 512}


@pytest.mark.parametrize(
    ("rows", "costs", "packed"),
    [
        ([2, 2], COSTS, [2]),
        ([2], Costs(COSTS.single, {256: 0.1}), []),
        ([2, 2], Costs(COSTS.single, {256: 15.0}), []),
        ([300, 2, 2], Costs({128: 3.5, 256: 9.0}, {256: 4.0}), []),
        ([2] * 200, COSTS, [64, 64, 64, 8]),
    ],
    ids=["cheaper", "a row alone", "does not pay", "a rung unmeasured", "64 rows an exchange"],
)
def test_rows_are_packed_where_that_is_cheaper(rows: list[int], costs: Costs, packed: list[int]) -> None:
    plan = parts(rows, [128, 256, 512], costs=costs, widths=[256])
    assert [len(part.rows) for part in plan if part.kind == "packed"] == packed


def test_a_function_is_charged_its_layers_and_bytes() -> None:
    """A folder of single-function packages holds its weights once a function."""
    assert charge(ARTIFACT) == Model(layers=22, nbytes=1000, smallest=128)
    assert charge(msgspec.structs.replace(ARTIFACT, path="model-macos14")).nbytes == 250
    for lack in ({"layers": msgspec.UNSET}, {"functions": [Function("packed256", packed_width=256)]}):
        with pytest.raises(BundleInvalid):
            charge(msgspec.structs.replace(ARTIFACT, **lack))
