#!/usr/bin/env python3
"""Write constraints.txt: every package, direct and indirect, that pip installs today for each supported Python.

`make lock` runs it. pip resolves (a dry run in an empty environment of each Python); here the answers become one file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from setup import CONSTRAINTS, EXTRAS, NVIDIA, ROOT, SUPPORTED, pythons

MORE = "clients,browser,ray,mutation"
"""Extras that a single make target installs."""
HEADER = """\
# The tested set: every package, direct and indirect, that the project installs on Linux. Made by `make lock`, used by
# scripts/setup.py, and so by make and .ci/run. What only macOS or Windows installs beside these is not named here.
"""


def resolve(program: str) -> dict[str, str]:
    """Return name -> version of everything that pip would install for the Python *program*."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "-m", "venv", folder], check=True)  # noqa: S603
        python = Path(folder) / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        report = Path(folder) / "report.json"
        options = ["-qq", "--dry-run", "--ignore-installed", "--report", str(report)]
        what = f"{ROOT}[{EXTRAS},{NVIDIA},{MORE}]"
        subprocess.run([python, "-m", "pip", "install", *options, what], check=True)  # noqa: S603
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    # The project itself is the one that comes from a folder.
    chosen = [item["metadata"] for item in found if "dir_info" not in item["download_info"]]
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in chosen}


def main() -> int:
    """Resolve for each Python and write the file; 1 when a supported Python is missing."""
    here = pythons()
    if missing := [minor for minor in SUPPORTED if minor not in here]:
        print(f"lock: needs every supported Python; not found: {', '.join(missing)}", file=sys.stderr)
        return 1
    resolved = {minor: resolve(here[minor]) for minor in sorted(SUPPORTED)}
    lines = []
    for name in sorted(set().union(*resolved.values())):
        versions = {minor: chosen.get(name) for minor, chosen in resolved.items()}
        if len(set(versions.values())) == 1:
            lines.append(f"{name}=={versions[SUPPORTED[0]]}\n")
        else:
            lines += [f'{name}=={v}; python_version == "{minor}"\n' for minor, v in versions.items() if v is not None]
    CONSTRAINTS.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{CONSTRAINTS.name}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
