"""`synapse serve`: one HTTP application over a host, for any program, for operators and for people.

Who owns what. `service.Service` holds the host and knows whether it is ready or stopping; it turns a request into a
call of the host and a failure into an answer. `api` is what clients of OpenAI, Cohere, Jina and TEI send; `operate` is
what the command's own verbs send, health and metrics; `page` is what a browser shows; `application` is all of them.
`bodies` says what a request may hold, `security` who may ask, `listening` serves it on TCP and on the Unix socket.

In which order. A connection passes the limits of `listening`, then `security` (Host, Origin, key), then the route's
endpoint: is there room, how large is the body, what does it say, and only then the host. Everything runs on the host's
own event loop and none of it blocks: what takes longer is cut into parts or is the host's own background work.

The extra `serve` brings the libraries. They are imported by these modules alone, so that nothing else pays for them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from synapse_host.errors import BackendMissing

LIBRARIES: Final = ("starlette", "uvicorn", "httpx", "prometheus_client")
"""What the extra brings."""


def require(*libraries: str) -> None:
    """Raise BackendMissing where a library of the extra `serve` is not installed."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise BackendMissing(
            f"this needs {', '.join(missing)}: pip install 'synapse-workers[serve]'", details={"missing": missing}
        )
