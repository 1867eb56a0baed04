"""Who may ask: the API key, and the names under which a browser reached this server.

A page of any web site can make its visitor's browser send requests to an address of the visitor's machine, and by DNS
rebinding even read the answers. Such a request says so itself: its Host is that site's name, or its Origin is. Without
a key only loopback names are answered; a page of another origin only where ``--cors`` names it.

What comes over the Unix socket is the host's own user: the socket is 0600 in a directory of 0700, and no browser
reaches it.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.bundle.manifest import read_plain
from synapse_host.errors import InvalidRequest
from synapse_host.serve.operate import CHANGES, COMMANDS
from synapse_host.serve.service import Refused, failure

OPERATOR: Final = "synapse.operator"
"""Set in the scope of what came over the Unix socket."""
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN: Final = frozenset({"/", "/page.js", "/page.css", "/health", "/ready"})
"""What needs no key: the page holds no data of its own, and load balancers show none."""
ENVIRONMENT: Final = "SYNAPSE_API_KEY"
MIN_KEY: Final = 16
MAX_KEY: Final = 1024


def read_key(file: Path | None) -> bytes | None:
    """Return the API key of a file, else of SYNAPSE_API_KEY, else None. InvalidRequest for one that can't be used."""
    if file is None:
        text, source = os.environ.get(ENVIRONMENT, ""), ENVIRONMENT
        if not text:
            return None
    else:
        source = str(file)
        try:
            _check_private(file)
            text = read_plain(file, MAX_KEY).decode("ascii").strip()
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "must be one line of ASCII"
            raise InvalidRequest(f"{source}: the API key can't be read: {reason}", details={"file": source}) from None
    if not re.fullmatch(rf"[!-~]{{{MIN_KEY},{MAX_KEY}}}", text):
        raise InvalidRequest(f"{source}: an API key is {MIN_KEY} to {MAX_KEY} printable characters without spaces")
    return text.encode()


def _check_private(file: Path) -> None:
    """Refuse a key file of this user's that others may read, as ssh does; InvalidRequest. One of root's is root's."""
    entry = file.stat()
    if os.name == "posix" and entry.st_uid == os.getuid() and entry.st_mode & 0o077:
        raise InvalidRequest(
            f"{file}: others may read this API key (mode {entry.st_mode & 0o777:04o}). Run: chmod 600 {file}",
            details={"file": str(file), "mode": f"{entry.st_mode & 0o777:04o}"},
        )


def guarded(app: ASGIApp, *, key: bytes | None, address: str, origins: Sequence[str]) -> ASGIApp:
    """Return *app* behind the checks of this module. *address*: what the server is bound to, a name for itself too."""
    for origin in origins:
        if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
            raise InvalidRequest(f"--cors {origin}: is no origin; write it as https://name or http://name:port")
    guard = _Guard(app, key, LOOPBACK | {address.lower()}, frozenset(origins))
    if not origins:
        return guard
    return CORSMiddleware(guard, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])


class _Guard:
    def __init__(self, app: ASGIApp, key: bytes | None, names: frozenset[str], origins: frozenset[str]) -> None:
        self._app, self._key, self._names, self._origins = app, key, names, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if OPERATOR not in scope:
            try:
                self._check(Headers(scope=scope), scope["path"])
            except Refused as exc:
                response = failure(exc)
                if exc.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "").lower()
        if self._key is None and re.sub(r":\d+$", "", host) not in self._names:
            raise Refused(403, "this server answers to loopback names only; give it an API key to use another one")
        origin = headers.get("origin")
        own = (None, f"http://{host}", f"https://{host}")
        if origin not in self._origins and origin not in own:
            raise Refused(403, "a page of another origin may not ask; name that origin with --cors")
        if path in OPEN:
            return
        if self._key is not None:
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            shown = shown.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(shown.encode("utf-8", "replace"), self._key):
                raise Refused(401, "this server needs its API key: Authorization: Bearer KEY")
        if path in COMMANDS:
            raise Refused(401, f"{path} is for the command synapse, over the Unix socket; programs use /v1")
        if self._key is None and path in CHANGES:
            verb = path.rpartition("/")[2]
            raise Refused(401, f"over TCP {path} needs synapse serve --api-key-file F; here use: synapse {verb}")
