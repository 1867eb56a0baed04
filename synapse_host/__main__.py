"""``python -m synapse_host`` is the ``synapse`` command."""

from __future__ import annotations

import sys

from synapse_host.cli import main

if __name__ == "__main__":
    sys.exit(main())
