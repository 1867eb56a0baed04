"""``GET /``: a page for people, three files as they are, without any outside resource.

The page holds no data of its own: its script asks the operator's routes, with the key where one is needed. What it
shows of workers, models and answers goes in as text, and the Content-Security-Policy lets no other script run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

FILES: Final = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> list[BaseRoute]:
    """Return the routes of the page's files."""
    return [_route(path, *file) for path, file in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = Path(__file__).with_name(name).read_bytes()

    async def file(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(path, file)
