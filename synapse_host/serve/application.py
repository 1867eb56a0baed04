"""The application: every route, and what a request to none of them gets."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from synapse_host.errors import SynapseError
from synapse_host.serve import api, operate, page
from synapse_host.serve.service import Refused, Service, failure, internal_error


def application(service: Service) -> Starlette:
    """Return the routes of a host as one ASGI application, without the checks of :mod:`synapse_host.serve.security`."""

    async def refuse(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        response = failure(Refused(exc.status_code, f"{request.method} {request.url.path[:200]}: {exc.detail}"))
        response.headers.update(exc.headers or {})
        return response

    async def fail(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, SynapseError)
        return failure(exc, getattr(request.state, "place", "operator"))

    async def break_down(request: Request, exc: Exception) -> Response:
        return internal_error(request)

    handlers = {HTTPException: refuse, SynapseError: fail, Exception: break_down}
    routes = [*page.routes(), *api.routes(service), *operate.routes(service)]
    app = Starlette(routes=routes, exception_handlers=handlers)
    # A path with a slash behind it is another one: the redirect that it would get has no body that says so.
    app.router.redirect_slashes = False
    return app
