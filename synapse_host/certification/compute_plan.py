"""Where a framework runs a loaded artifact: asked in a throw-away child, since a plan takes seconds to minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from synapse_host.certificates.document import Function
from synapse_host.errors import BundleInvalid

if TYPE_CHECKING:
    from synapse_host.placement.assignment import Assignment

Table: TypeAlias = tuple[list[Function], list[str], str | None]
"""Functions, the operators that the engine allows on the CPU, and why there are no functions."""
Plans: TypeAlias = Callable[["Assignment"], Table]


def plan_tool(assignment: Assignment) -> Table:
    """Ask ``python -m engines.ane plan`` about the artifact that the lane loads."""
    from engines.bundle.manifest import FILE_NAME
    from synapse_host.models import builder

    spec = assignment.require()
    manifest = assignment.bundle.path(FILE_NAME)
    argv = ["engines.ane", "plan", spec.load.artifact_path, "--manifest", str(manifest)]
    try:
        result = builder.run_tool(argv, stage="plan")
        return msgspec.convert(result["functions"], list[Function]), [str(op) for op in result["cpu_allowed"]], None
    except BundleInvalid as exc:
        return [], [], exc.message
    except (KeyError, msgspec.ValidationError) as exc:
        return [], [], f"the plan tool's answer can't be used: {exc}"
