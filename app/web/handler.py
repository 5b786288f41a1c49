"""HTTP requests of the page: its files, the list of networks, predictions."""

import dataclasses
import ipaddress
import json
import socket
from contextlib import suppress
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from app.config.errors import UserError
from app.web.answer import predict_picture, read_picture
from app.web.networks import find_networks

if TYPE_CHECKING:
    from app.web.server import Server

PAGE = Path(__file__).parent / "page"
MAX_BODY = 2**20  # bytes
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


class Handler(SimpleHTTPRequestHandler):
    """A connection.

    Errors are answered by a JSON object with the key `error`. Requests with a foreign Host header
    (DNS rebinding) or a foreign Origin header (other sites) are refused.
    """

    server: "Server"
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "lenet-ops", ""
    disable_nagle_algorithm = True  # or an answer waits 40 ms
    timeout = 60  # seconds until an idle connection is closed
    body = b""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(PAGE))

    def parse_request(self) -> bool:
        """Parse the headers and read the body; return whether the request is to be answered.

        Read the whole body, because unread data would reset the connection.
        """
        if not super().parse_request():
            return False
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
            return False
        self.body = self.rfile.read(min(int(length), MAX_BODY))
        unread = int(length) - len(self.body)
        while unread and (part := self.rfile.read(min(unread, MAX_BODY))):
            unread -= len(part)
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if unread:
            self.close_connection = True
            self.server.warn("a client aborted its upload")
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
        path = urlsplit(self.path).path
        if path == "/api/networks":
            self.server.networks = find_networks(self.server.outputs, self.server.first)
            listed = map(dataclasses.asdict, self.server.networks.values())
            self.send_json([{key: it[key] for key in it if key != "path"} for it in listed])
        elif path == "/api/predict":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Answer a prediction."""
        address = urlsplit(self.path)
        id = dict(parse_qsl(address.query)).get("network", "")
        if address.path != "/api/predict":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        elif id not in self.server.networks:
            self.send_error(HTTPStatus.NOT_FOUND, f"network={id}: not one of /api/networks")
        else:
            gray = read_picture(self.body)
            with self.server.predicting:
                answer = predict_picture(self.server.networks[id].path, gray)
            self.send_json(answer)

    def handle_one_request(self) -> None:
        """Answer the next request, also after an error."""
        try:
            super().handle_one_request()
        except UserError as error:
            self.send_error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error as JSON."""
        self.send_json({"error": message or HTTPStatus(code).phrase}, code)

    def send_json(self, value: Any, code: int = HTTPStatus.OK) -> None:
        """Send a value as JSON."""
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def end_headers(self) -> None:
        """Send the headers, with `HEADERS`."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests."""


def is_own(host: str, listened: str) -> bool:
    """Return whether a Host header names the server, or is an IP address: rebinding needs a name.

    `listened` is the address that the server listens on.
    """
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        if name in LOOPBACK or name == listened.lower():
            return True
        if listened not in LOOPBACK:
            return name == socket.gethostname().lower() or bool(ipaddress.ip_address(name))
    return False
