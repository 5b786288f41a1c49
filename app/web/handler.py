"""HTTP requests of the page: its files, the list of networks, predictions."""

import ipaddress
import json
import re
import socket
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from app.config.errors import UserError, is_out_of_memory
from app.web.answer import predict_drawing, read_drawing
from app.web.networks import find_networks, title_of

if TYPE_CHECKING:
    from app.web.server import Server

# Contents and media types: files are not opened later, where descriptors may lack.
PAGE = {
    f"/{path.name}": (path.read_bytes(), str(guess_type(path)[0]))
    for path in (Path(__file__).parent / "page").iterdir()
}
MAX_BODY = 2**20  # bytes
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Handler(BaseHTTPRequestHandler):
    """A connection.

    Errors are answered by a JSON object with the key `error` and close the connection. Requests
    with a foreign Host header (DNS rebinding) or a foreign Origin header (other sites) are refused.
    """

    server: "Server"
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # has a status line also in answers to unknown versions
    server_version, sys_version = "lenet-ops", ""
    disable_nagle_algorithm = True  # or an answer waits 40 ms
    timeout = 5  # seconds until an idle connection is closed
    body = b""

    def parse_request(self) -> bool:
        """Parse the headers and read the body; return whether the request is to be answered.

        Read the whole body, because unread data would reset the connection.
        """
        if not super().parse_request():
            return False
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch("[0-9]{1,15}", length) or "Transfer-Encoding" in self.headers:
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
            return False
        self.body = self.rfile.read(min(int(length), MAX_BODY))
        unread = int(length) - len(self.body)
        while unread and (part := self.rfile.read(min(unread, MAX_BODY))):
            unread -= len(part)
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if unread:
            self.close_connection = True  # the client aborted its upload
        elif not is_own(host, self.server.host):
            self.send_error(HTTPStatus.FORBIDDEN, f"Host: {host}: not this server's name")
        elif origin not in (None, f"http://{host}"):
            self.send_error(HTTPStatus.FORBIDDEN, f"Origin: {origin}: another site")
        elif int(length) > MAX_BODY:
            too_large = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            self.send_error(too_large, f"more than {MAX_BODY:,} bytes")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer the list of networks or a file of the page."""
        path, _, _ = self.path.partition("?")
        if path == "/api/networks":
            self.server.networks = find_networks(self.server.outputs, self.server.first)
            networks = self.server.networks.items()
            self.send_json([{"id": id, "title": title_of(path)} for id, path in networks])
        elif path == "/api/predict":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif file := PAGE.get("/index.html" if path == "/" else path):
            self.send(*file)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Answer a prediction."""
        path, _, query = self.path.partition("?")
        id = dict(parse_qsl(query)).get("network", "")
        network = self.server.networks.get(id)  # they may be replaced meanwhile
        if path != "/api/predict":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif network is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"network={id}: not one of /api/networks")
        else:
            gray = read_drawing(self.body)
            with self.server.predicting:
                answer = predict_drawing(network, gray)
            self.send_json(answer)

    def handle_one_request(self) -> None:
        """Answer the next request, also after an error."""
        try:
            super().handle_one_request()
        except UserError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            if is_out_of_memory(error):
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "out of memory")
                return
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as JSON."""
        self.send_json({"error": message or HTTPStatus(code).phrase}, code)

    def send_json(self, value: Any, code: int = HTTPStatus.OK) -> None:
        """Send a value as JSON."""
        self.send(json.dumps(value).encode(), "application/json", code)

    def send(self, content: bytes, kind: str, code: int = HTTPStatus.OK) -> None:
        """Send a response; after an error the rest of the stream may not be a request."""
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(content))}
        headers |= {"Connection": "close"} if code >= HTTPStatus.BAD_REQUEST else {}
        for name, value in (headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests."""


def is_own(host: str, listened: str) -> bool:
    """Return whether a Host header names the server, or is an IP address: rebinding needs a name.

    `listened` is the address that the server listens on.
    """
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname or "", parts.port  # raises for a port that is none
        if name in LOOPBACK or name == listened.lower():
            return True
        if listened not in LOOPBACK:
            return name == socket.gethostname().lower() or bool(ipaddress.ip_address(name))
    return False
