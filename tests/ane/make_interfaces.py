"""Make ``coreml_interfaces.json``: what Apple's headers say of the Core ML classes that the binding calls.

    python tests/ane/make_interfaces.py coreml.fwinfo

The input is the list that PyObjC's ``objective.metadata`` writes when it reads a macOS SDK: every class, selector and
argument type with the system that introduced it. Of the classes below everything is kept, what the binding doesn't call
as well, so that a call of a neighbour is judged by facts, too. The stand-in framework of these tests
(``coreml_standin.py``) is made from the result.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("coreml_interfaces.json")
CLASSES = (
    "MLCPUComputeDevice", "MLComputePlan", "MLComputePlanCost", "MLComputePlanDeviceUsage",
    "MLDictionaryFeatureProvider", "MLFeatureDescription", "MLFeatureValue", "MLGPUComputeDevice", "MLModel",
    "MLModelConfiguration", "MLModelDescription", "MLModelStructure", "MLModelStructureProgram",
    "MLModelStructureProgramArgument", "MLModelStructureProgramBinding", "MLModelStructureProgramBlock",
    "MLModelStructureProgramFunction", "MLModelStructureProgramNamedValueType", "MLModelStructureProgramOperation",
    "MLMultiArray", "MLMultiArrayConstraint", "MLNeuralEngineComputeDevice", "MLOptimizationHints",
)  # fmt: skip
PROTOCOLS = ("MLComputeDeviceProtocol", "MLFeatureProvider")
ENUMS = ("MLComputeUnits", "MLMultiArrayDataType", "MLReshapeFrequencyHint")


def value_type(of: dict[str, Any], instance: str = "") -> str:
    """Return a class (``NSURL``), ``id``, a block (``block(MLComputePlan,NSError)``) or an encoding (``q``).

    An argument that gives a value back has ``out `` before it.
    """
    if "callable" in of:
        given = sorted(of["callable"]["arguments"].items(), key=lambda item: int(item[0]))[1:]  # the first is the block
        return f"block({','.join(value_type({'typestr': one['type'], **one}) for _, one in given)})"
    encoding, name = of.get("typestr", of.get("type", "")), of.get("type_name", "")
    if encoding not in ("@", "^@"):
        return str(encoding)
    if name == "instancetype":
        return instance
    plain = re.sub(r"_Nullable|_Nonnull|\*|\s", "", name) or "id"
    return f"out {plain}" if of.get("type_modifier") == "o" else plain


def methods(of: dict[str, Any], instance: str = "") -> dict[str, list[Any]]:
    """Return ``+selector`` or ``-selector`` to [introduced, result, arguments]."""
    return {
        f"{'+' if one['class_method'] else '-'}{one['selector']}": [
            one["introduced"],
            value_type(one["retval"], instance),
            [value_type(argument) for argument in one["args"]],
        ]
        for one in of["methods"]
    }


def table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the compact table of an interface list."""
    known = document["definitions"]
    classes = {name: known["classes"][name] for name in CLASSES}
    return {
        "sdk": f"{document['framework']}, macOS {document['release']}",
        "classes": {
            name: {
                "protocols": [one for one in of["protocols"] if one in PROTOCOLS],
                "methods": methods(of, name),
            }
            for name, of in classes.items()
        },
        "protocols": {name: {"methods": methods(known["formal_protocols"][name])} for name in PROTOCOLS},
        "functions": {
            name: [of["introduced"], value_type(of["retval"]), [a["typestr"] for a in of["args"] if a["name"]]]
            for name, of in known["functions"].items()
        },
        "enums": {name: of["value"] for name, of in known["enum"].items() if of.get("enum") in ENUMS},
    }


def lines(value: Any, indent: str = "") -> str:
    """Return JSON with every object's keys on lines of their own and every array on one."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    rows = [f"{inner}{json.dumps(key)}: {lines(one, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> int:
    """Read the list named on the command line and write the table, one selector a line."""
    text = Path(sys.argv[1]).read_text()
    TABLE.write_text(lines(table(json.loads(text[text.index("{") :]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
