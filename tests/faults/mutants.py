"""R15: the mutation score of the wire and the supervision policy.

A small mutator: one change at a time (a comparison, a constant, a boolean, an arithmetic sign, a condition, a statement
left out, a returned value), then the module's own tests, which must fail. Each mutant runs in a forked child with the
changed module in place of the real one, so nothing on disk ever changes.

    python -m tests.faults.mutants [--sample N] [--module NAME] [--verbose]
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.util
import io
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from tests.faults.ledger import Row

ROOT = Path(__file__).parents[2]
TARGETS: dict[str, list[str]] = {
    "synapse_host.quarantine": ["tests/host/test_quarantine.py"],
    "synapse_host.watchdog": ["tests/host/test_watchdog.py"],
    "synapse_host.handshake": ["tests/host/test_handshake.py"],
    "engines.protocol.framing": ["tests/protocol/test_framing.py", "tests/protocol/test_vectors.py"],
    "engines.protocol.connection": ["tests/protocol/test_connection.py", "tests/protocol/test_vectors.py"],
    "engines.protocol.messages": [
        "tests/protocol/test_messages.py",
        "tests/protocol/test_vectors.py",
        "tests/protocol/test_connection.py",
    ],
    "engines.protocol.states": ["tests/protocol/test_document.py", "tests/protocol/test_vectors.py"],
    "engines.protocol.errors": ["tests/protocol/test_errors.py", "tests/protocol/test_vectors.py"],
}
NIGHTLY_SCORE = 0.9
LIMIT_S = 120
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Mutant:
    """One change: its place, and the module's source with it."""

    def __init__(self, line: int, what: str, tree: ast.Module) -> None:
        self.line = line
        self.what = what
        self.tree = tree

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of *source*. Annotations, docstrings and the wording of errors are left alone."""
    tree = ast.parse(source)
    for index, node in enumerate(_changeable(tree)):
        for number, (what, _) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            twin = list(_changeable(changed))[index]
            _changes(twin)[number][1]()
            yield Mutant(getattr(node, "lineno", 0), what, ast.fix_missing_locations(changed))


def _changeable(tree: ast.Module) -> Iterator[ast.AST]:
    """Walk the nodes that run and that a test could miss."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            if isinstance(node, ast.Raise) and name == "exc":
                # The wording of an error is not under test, that it is raised is.
                continue
            if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            children = value if isinstance(value, list) else [value]
            for child in children:
                if not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue
                if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                    continue
                stack.append(child)


def _changes(node: ast.AST) -> list[tuple[str, Any]]:
    """Return (description, function that carries it out on this very node)."""
    found: list[tuple[str, Any]] = []
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            other = _SWAPS.get(type(operator))
            if other is not None:

                def swap(place: int = place, other: type[ast.AST] = other) -> None:
                    node.ops[place] = other()  # type: ignore[call-overload]

                found.append((f"{type(operator).__name__} becomes {other.__name__}", swap))
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        other = _SWAPS.get(type(node.op))
        if other is not None:
            found.append((f"{type(node.op).__name__} becomes {other.__name__}", lambda: setattr(node, "op", other())))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found.append(("not is left out", lambda: _drop_not(node)))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            found.append((f"{node.value} becomes {not node.value}", lambda: setattr(node, "value", not node.value)))
        elif isinstance(node.value, int):
            found.append((f"{node.value} becomes {node.value + 1}", lambda: setattr(node, "value", node.value + 1)))
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        for value in (True, False):
            if isinstance(node, ast.While) and value:
                continue

            def fix(value: bool = value) -> None:
                node.test = ast.Constant(value)

            found.append((f"the condition is always {value}", fix))
    elif isinstance(node, ast.Return) and node.value is not None:
        value = ast.Constant(True) if isinstance(node.value, ast.Compare | ast.BoolOp) else ast.Constant(None)
        if not isinstance(node.value, ast.Constant):
            found.append((f"{value.value} is returned", lambda: setattr(node, "value", value)))
    if hasattr(node, "body") and isinstance(node.body, list) and not isinstance(node, ast.Module | ast.ClassDef):
        for place, statement in enumerate(node.body):
            if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Delete) and not (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            ):

                def leave_out(place: int = place) -> None:
                    node.body[place] = ast.Pass()

                found.append((f"line {statement.lineno} is left out: {ast.unparse(statement)[:60]}", leave_out))
    return found


def _drop_not(node: ast.UnaryOp) -> None:
    """`not x` becomes `not not x`, which is bool(x)."""
    node.op = ast.Not()
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


# --- running one -----------------------------------------------------------------------------------------------------


class _Finder:
    """Puts the mutated source in the place of one module."""

    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self.name = name
        self.code = compile(tree, path, "exec")
        self.path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(self.code, module.__dict__)


def killed(name: str, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Return whether the module's own tests notice *mutant* (a hang counts as noticed)."""
    child = os.fork()
    if child == 0:
        status = 3
        with suppress(BaseException):
            os.setsid()
            status = _child(name, mutant, tests)
        os._exit(status)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _child(name: str, mutant: Mutant, tests: Sequence[str]) -> int:
    import pytest

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    for loaded in [module for module in sys.modules if module.split(".")[0] in ("engines", "synapse_host", "tests")]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, _Finder(name, mutant.tree, spec.origin))  # type: ignore[arg-type]
    sink = io.StringIO()
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0"]
    # What the parent imported already is no warning here.
    options += ["-o", "filterwarnings=default"]
    with redirect_stdout(sink), redirect_stderr(sink):
        return int(pytest.main([*options, *tests]))


def sample(name: str, count: int | None, seed: int) -> list[Mutant]:
    """Return the mutants of a module, or so many of them."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    found = list(mutants(Path(spec.origin).read_text()))
    if count is None or count >= len(found):
        return found
    return random.Random(seed).sample(found, count)


def score(name: str, count: int | None = None, *, seed: int = 15, verbose: bool = False) -> dict[str, Any]:
    """Run the mutants of one module and return what became of them."""
    os.chdir(ROOT)
    import hypothesis  # noqa: F401 - forked children have it then
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    control = Mutant(0, "nothing is changed", ast.parse(Path(spec.origin).read_text()))
    if killed(name, control, TARGETS[name]):
        raise AssertionError(f"{name}: the tests fail without a mutant, so a score would mean nothing")
    chosen = sample(name, count, seed)
    survivors = []
    for number, mutant in enumerate(chosen, 1):
        if not killed(name, mutant, TARGETS[name]):
            survivors.append(str(mutant))
        if verbose:
            told = "SURVIVED" if survivors and survivors[-1] == str(mutant) else "killed"
            print(f"{name} {number}/{len(chosen)} {told} {mutant}", file=sys.stderr, flush=True)
    return {"mutants": len(chosen), "killed": len(chosen) - len(survivors), "survivors": survivors}


def r15(sample_size: int | None = None) -> Any:
    """The share of mutants that the tests notice, over all targets."""
    row = Row("R15", f"mutation score, at least {NIGHTLY_SCORE:.0%}")

    def body() -> None:
        total = noticed = 0
        for name in TARGETS:
            result = score(name, sample_size)
            total += result["mutants"]
            noticed += result["killed"]
            row.notes[name] = {**result, "survivors": result["survivors"][:40]}
        row.injected = row.survived = total
        row.notes["score"] = round(noticed / total, 3)
        row.check(noticed / total >= NIGHTLY_SCORE, f"{noticed} of {total} mutants noticed")

    return row, body


def main() -> int:
    """Run by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants")
    parser.add_argument("--sample", type=int, help="mutants per module")
    parser.add_argument("--module", choices=TARGETS)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    for name in [arguments.module] if arguments.module else TARGETS:
        result = score(name, arguments.sample, verbose=arguments.verbose)
        print(f"{name}: {result['killed']} of {result['mutants']} noticed", flush=True)
        for survivor in result["survivors"]:
            print(f"    survives: {survivor}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
