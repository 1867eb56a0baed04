#!/usr/bin/env python3
"""docs/app.md, the Python API: made from the signatures and docstrings of the host.

python scripts/app_page.py            print it
python scripts/app_page.py --write    write docs/app.md
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from synapse_host import errors
from synapse_host.errors import SynapseError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "app.md"
WIDTH = 100
"""Characters of a signature on one line."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

INTRO = """# In your app

This page is made from the code: `python scripts/app_page.py --write`.

```python
from synapse_host import Host, HostConfig, SyncHost, SynapseError

async with Host.open(models={"minilm": "path/to/bundle"}) as host:  # without models: the installed ones
    vectors = await host.embed("minilm", ["a text", "another"], deadline=2.0)

with SyncHost.open(config=HostConfig(idle_unload=600)) as host:  # the same calls, from any thread
    try:
        scores = host.rerank("ms-marco", "a question", ["a document", "another"])
    except SynapseError as error:
        if not error.safe_to_retry:
            raise
```

A program opens one host and keeps it: workers start at the first request and stay. Each lane has one worker, a process
of its own; what kills it raises `engine_crashed` here and the next request starts another. Nothing is retried inside.
Deadlines are seconds from the call; a caller that leaves harms nobody. Open a host after a fork, not before. Every
error is a `SynapseError` with `code`, `transient`, `retry_after_ms`, `safe_to_retry` and `details`.
"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRO]
    host = _class("host.py", "Host")
    parts += ["## Host", _text(host), *(_method(node, "Host") for node in _public(host))]
    sync = _class("sync.py", "SyncHost")
    own = [node for node in _public(sync) if node.name in ("open", "call")]
    parts += ["## SyncHost", _text(sync), "Every call of `Host` with the same arguments, without `await`; and:"]
    parts += [_method(node, "SyncHost") for node in own]
    for name, file in (("HostConfig", "config.py"), ("Windows", "config.py")):
        parts += [f"## {name}", _text(_class(file, name)), _fields(_class(file, name))]
    parts += ["## Results", "From `synapse_host.results`."]
    for name in ("EmbedResult", "RerankResult", "Generation"):
        node = _class("results.py", name)
        parts += [f"### {name}", _text(node), _fields(node)]
        parts += [f"`{each.name}`: {_text(each)}" for each in _public(node)]
    parts += ["## Errors", _text(_class("errors.py", "SynapseError")), _errors()]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _class(file: str, name: str) -> ast.ClassDef:
    module = ast.parse((ROOT / "synapse_host" / file).read_text("utf-8"))
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _public(node: ast.ClassDef) -> Iterator[Function]:
    for each in node.body:
        if isinstance(each, Function) and not each.name.startswith("_"):
            yield each


def _method(node: Function, owner: str) -> str:
    return f"### {node.name}\n\n```python\n{_signature(node, owner)}\n```\n\n{_text(node)}"


def _signature(node: Function, owner: str) -> str:
    """Return a call as a program writes it: without self, with ``async`` where it is awaited or iterated."""
    arguments = node.args
    first = len(arguments.args) - len(arguments.defaults)
    words = [
        _parameter(each, arguments.defaults[at - first] if at >= first else None)
        for at, each in enumerate(arguments.args)
    ][1:]
    if arguments.kwonlyargs:
        words.append("*")
    words += map(_parameter, arguments.kwonlyargs, arguments.kw_defaults)
    managed = any("contextmanager" in ast.unparse(each) for each in node.decorator_list)
    word = f"with {owner}." if managed else "def "
    start = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{word}{node.name}("
    returns = ") as host:" if managed else f") -> {ast.unparse(node.returns)}" if node.returns else ")"
    line = start + ", ".join(words) + returns
    return line if len(line) <= WIDTH else start + "".join(f"\n    {word}," for word in words) + "\n" + returns


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(node.annotation)}" if node.annotation else ""
    return f"{node.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


def _text(node: ast.ClassDef | Function) -> str:
    return _plain(ast.get_docstring(node) or "")


def _plain(text: str) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r":\w+:`~[\w.]*\.(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:(`[\w.]+`)", r"\1", text).replace("``", "`")


def _fields(node: ast.ClassDef) -> str:
    """Return a table of a data class's fields, with the strings that follow them."""
    rows = ["| field | type | default | what |", "| --- | --- | --- | --- |"]
    for each, follower in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign):
            match follower:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    about = _plain(" ".join(said.split()))
                case _:
                    about = ""
            default = "" if each.value is None else f"`{_default(each.value)}`"
            kind = ast.unparse(each.annotation).replace("|", "\\|")
            rows.append(f"| `{ast.unparse(each.target)}` | `{kind}` | {default} | {about} |")
    return "\n".join(rows)


def _default(value: ast.expr) -> str:
    made = re.match(r"field\(default_factory=(\w+)\)", ast.unparse(value))
    return ast.unparse(value) if made is None else {"dict": "{}"}.get(made[1], f"{made[1]}()")


def _errors() -> str:
    """Return a table of the classes, as interfaces.md has their codes."""
    rows = ["| class in `synapse_host.errors` | code | when | transient | retry after | safe to retry |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, SynapseError) and hasattr(kind, "code"):
            wait = "" if kind.default_retry_after_ms is None else f"{kind.default_retry_after_ms} ms"
            when = _plain(kind.__doc__ or "").splitlines()[0]
            transient, safe = ("yes" if each else "no" for each in (kind.transient, kind.safe_to_retry))
            rows.append(f"| `{name}` | `{kind.code}` | {when} | {transient} | {wait} | {safe} |")
    worker = ", ".join(f"`{code}`" for code in errors.WORKER_ERRORS)
    return "\n".join(rows) + f"\n\nWhat a worker answers is a `WorkerError` with its code: {worker}."


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/app.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
