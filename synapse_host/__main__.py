"""The ``synapse`` command, also as ``python -m synapse_host``.

Signals come at any moment, so before anything else is imported Ctrl-C gets an answer of its own: while a command only
starts there is nothing to end in order, and an interrupted import would look like a fault of ours.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

EXIT_INTERRUPTED: Final = 130
DOCUMENT: Final = (
    b'{"error": {"code": "interrupted", "class": "permanent", "safe_to_retry_same_request": true, '
    b'"message": "interrupted", "details": {}}}\n'
)


def _too_early(number: int, frame: object) -> NoReturn:
    if "--json" in sys.argv:
        os.write(1, DOCUMENT)
    elif "--quiet" not in sys.argv:
        os.write(2, b"synapse: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> NoReturn:
    """Run the command of this process and leave with its exit code."""
    # Not where whoever started us ignores it: nohup, or a shell's background job.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _too_early)
    from synapse_host import cli

    code = cli.main()
    if heeded:
        # All is done and said: a signal during the interpreter's own end would make a failure of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
