"""Middleware: refuse requests from other sites, add security headers to responses."""

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Guard:
    """Middleware that refuses requests with a foreign Host or Origin header.

    The Host check stops DNS rebinding, the Origin check cross-site requests. `host` is the address
    that the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to foreign requests; add `HEADERS` to every response."""
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        host, origin = headers.get("host", ""), headers.get("origin")
        refused = None
        if not self._is_own(host):
            refused = f"Host: {host}: not this server's name"
        elif origin is not None and origin != f"{scope['scheme']}://{host}":
            refused = f"Origin: {origin}: another site"
        if refused is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await JSONResponse({"error": refused}, 403)(scope, receive, send_with_headers)

    def _is_own(self, host: str) -> bool:
        """Return whether the Host header names this server or is an IP; rebinding needs a name."""
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            if name in LOOPBACK or name == self._host.lower():
                return True
            if self._host not in LOOPBACK:
                return (
                    name == socket.gethostname().lower() or ipaddress.ip_address(name) is not None
                )
        return False
