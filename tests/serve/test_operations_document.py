"""``docs/operations.md`` says what the code does: its tables are read and compared."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from engines.protocol.errors import ErrorCode
from synapse_host import errors
from synapse_host.errors import WORKER_ERRORS, EngineCrashed, SynapseError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text("utf-8").replace("\n  ", " ")
"""The page with each entry of its lists on one line."""


CODES = {
    row[0].replace("`", ""): row[1:]
    for row in re.findall(r"^- (`\w+`[^:(]*?)(?: \(([^)]*)\))?: (.+) → (.+)$", TEXT, re.MULTILINE)
}
"""What the page says of each code: what isn't usual, the meaning, what to do."""


def described(error: type[SynapseError]) -> str:
    """Return the column of class, safety and exit code as the page writes it: only what isn't usual."""
    told, retry = error(""), error.default_retry_after_ms
    assert retry is None or (error.transient and error.safe_to_retry)
    said = [f"{retry} ms"] if retry is not None else ["transient"] * error.transient + ["safe"] * error.safe_to_retry
    said += [f"exit {told.exit_code}"] if told.exit_code != 1 else []
    return ", ".join(said)


def host_errors() -> list[type[SynapseError]]:
    """Return every class of errors.py with a code of its own."""
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SynapseError)]
    return [error for error in found if "code" in vars(error) and error is not errors.WorkerError]


def test_every_code_has_a_line_and_no_line_is_about_another() -> None:
    expected = {error.code: described(error) for error in host_errors()} | {"internal_error": ""}
    for code in ErrorCode:
        name = f"{code.value} from a worker" if code is ErrorCode.INVALID_REQUEST else code.value
        expected[name] = described(WORKER_ERRORS[code])
    shut = EngineCrashed("x", details={"quarantined": True})
    expected["engine_crashed with quarantined"] = f"remaining ms, exit {shut.exit_code}"
    assert {code: row[0] for code, row in CODES.items()} == expected


def test_the_exit_codes():
    named = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    section = TEXT.split("## Exit codes")[1].split("\n## ")[0]
    assert {int(code) for code in re.findall(r"(?:^|, |,\n)(\d+): ", section, re.MULTILINE)} == named


# --- names -----------------------------------------------------------------------------------------------------------


def test_every_field_of_a_crash_is_explained():
    section = TEXT.split("## Reading a crash")[1].split("\n## ")[0]
    fields = {
        name for names in re.findall(r"^- ([^:]+): ", section, re.MULTILINE) for name in re.findall(r"\w+", names)
    }
    written: set[str] = set()
    for module in ("supervision/standing", "worker/refusals", "supervision/health"):
        for node in ast.walk(ast.parse((ROOT / "synapse_host" / f"{module}.py").read_text())):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if {"stage", "cause"} <= keys or ({"worker_pid", "generation"} <= keys and "state" not in keys):
                    written |= keys
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("details"):
                written |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    assert len(written) > 8
    assert written <= fields, written - fields


def test_every_log_line_of_supervision_is_listed():
    lines = TEXT.split("The host's own loggers")[1].split("\n\n")[1].replace("=", " ")
    for module in (
        "worker/session",
        "worker/listener",
        *(f"supervision/{name}" for name in ("supervisor", "lifecycle", "standing")),
    ):
        tree = ast.parse((ROOT / "synapse_host" / f"{module}.py").read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "_log"
                and isinstance(node.args[0], ast.Constant)
            ):
                start = node.args[0].value.partition(":")[0]
                assert start in lines, f"{module}.py logs {start!r}, which the page doesn't list"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
