#!/usr/bin/env python3
"""Print the requirements of an extra, one a line: `make bench-rivals` installs those of rivals without the project."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(project["project"]["optional-dependencies"][sys.argv[1]]))
