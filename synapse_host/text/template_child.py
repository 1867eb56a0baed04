"""The process that renders chat templates: a program of its own, started by :mod:`synapse_host.text.chat`.

A chat template is a program of the bundle. jinja2's sandbox keeps it from reaching anything, and nothing keeps it from
taking all memory or all time, so it runs here, under the limits of the operating system: processor seconds a template,
memory, files. Whatever goes beyond them ends this process and no other.

It imports nothing of this package, so that it starts quickly and in any folder. Standard input is a connection of
:mod:`multiprocessing` and carries both ways: a request is JSON {template, messages, tokens}, a reply a letter for what
it is (:data:`KINDS`) and text in UTF-8. The end of the connection ends the process, also in the middle of a template.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

TEXT: Final = b"t"
REFUSED: Final = b"r"
FAILED: Final = b"f"
UNREADABLE: Final = b"u"
MISSING: Final = b"m"
KINDS: Final = (TEXT, REFUSED, FAILED, UNREADABLE, MISSING)
"""Rendered; the template called raise_exception; it failed; it can't be parsed; there is no jinja2 for it."""

MAX_RENDERED: Final = 4 * 1024 * 1024
"""Characters that a template may write."""
MAX_MESSAGE: Final = 1000
"""Characters of an error."""
CPU_S: Final = 5
"""Processor seconds of one template; a real one takes milliseconds."""
MEMORY_BYTES: Final = 1024 * 1024 * 1024
"""Address space of the process, interpreter included."""
MAX_FILES: Final = 16


class Refused(Exception):
    """The template called raise_exception."""


def reply_to(request: Mapping[str, Any]) -> tuple[bytes, str]:
    """Render a request; return what came of it and the text or the reason."""
    try:
        compiled = _compiled(request["template"])
    except ImportError as exc:
        return MISSING, str(exc)
    except Exception as exc:  # a template is foreign code: whatever it raises, the bundle is at fault
        return UNREADABLE, _told(exc)
    try:
        return _rendered(compiled, request["messages"], request["tokens"])
    except Refused as exc:
        return REFUSED, str(exc)
    except Exception as exc:  # foreign code, as above
        return FAILED, _told(exc)


def _told(exc: Exception) -> str:
    return "it takes too much memory" if isinstance(exc, MemoryError) else str(exc) or type(exc).__name__


def _rendered(compiled: Any, messages: list[dict[str, str]], tokens: Mapping[str, str]) -> tuple[bytes, str]:
    variables: dict[str, Any] = {
        # What transformers passes: a template tells "no tools" from None.
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        **tokens,
        "messages": messages,
    }
    parts: list[str] = []
    size = 0
    for part in compiled.generate(**variables):
        size += len(part)
        if size > MAX_RENDERED:
            return FAILED, f"it writes more than {MAX_RENDERED} characters"
        parts.append(part)
    return TEXT, "".join(parts)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return environment().from_string(template)


def environment() -> Any:
    """Return a sandbox with what transformers offers to templates; ImportError without a jinja2 that is known good."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < (3, 1, 6):
        raise ImportError("older ones have known ways out of the sandbox")

    class Generation(Extension):
        """``{% generation %}`` marks what a model wrote, for training; here it is its own content."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise Refused(str(message))

    def tojson(value: Any, **options: Any) -> str:
        # jinja2's own filter escapes for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # A function, not the class: a class has attributes without an underscore that lead further.
    sandbox.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    sandbox.globals.pop("lipsum", None)
    return sandbox


# --- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve requests until the connection ends."""
    time.localtime()  # reads the time zone while files may be opened
    connection = _standard_input()
    _limit()
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, requests.put), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        _allow_seconds()
        kind, text = reply_to(request)
        connection.send_bytes(kind + (text if kind == TEXT else text[:MAX_MESSAGE]).encode("utf-8", "replace"))


def _standard_input() -> Any:
    if sys.platform == "win32":
        import msvcrt
        from multiprocessing.connection import PipeConnection

        return PipeConnection(msvcrt.get_osfhandle(0))
    from multiprocessing.connection import Connection

    return Connection(0)


def _receive(connection: Any, put: Callable[[bytes], None]) -> None:
    """Pass requests on; end the process with the connection: whoever started us is gone."""
    with suppress(EOFError, OSError):
        while True:
            put(connection.recv_bytes())
    os._exit(0)


def _limit() -> None:
    if sys.platform != "win32":
        import resource

        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: MAX_FILES}
        if sys.platform == "linux":  # elsewhere the host watches the memory
            limits[resource.RLIMIT_AS] = MEMORY_BYTES
        for which, limit in limits.items():
            with suppress(ValueError, OSError):  # a limit of the machine is lower already
                resource.setrlimit(which, (limit, limit))


def _allow_seconds() -> None:
    """Let the process have CPU_S more seconds of processor time; SIGXCPU ends it then."""
    if sys.platform != "win32":
        import resource

        used = int(time.process_time())
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (used + 1 + CPU_S, hard))


if __name__ == "__main__":
    main()
