"""The server of `python -m app.draw`: one page and a JSON API."""

import errno
import os
import socket
import sys
import threading
import time
import webbrowser
from http.server import ThreadingHTTPServer
from typing import Any

import torch

from app.config.errors import UserError
from app.config.schema import DrawConfig
from app.web.handler import Handler
from app.web.networks import Entry, find_networks, load_network

DEFAULT_PORT = 8000
PAUSE = 10.0  # seconds between equal warnings


class Server(ThreadingHTTPServer):
    """The server on the socket `listener`, with a thread for each connection."""

    def __init__(
        self, cfg: DrawConfig, networks: dict[str, Entry], listener: socket.socket
    ) -> None:
        self.networks = networks  # by id
        self.host, self.outputs, self.first = cfg.host, cfg.outputs, cfg.checkpoint
        self.predicting = threading.Lock()  # one core: a second does not speed up a single image
        self._warned: dict[str, float] = {}  # time of each warning
        super().__init__(listener.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def get_request(self) -> Any:
        """Accept a connection; at the limit of open files wait a second."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.warn("too many open files: new connections wait until others are closed")
                time.sleep(1)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, except for connections that the client has closed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def warn(self, line: str) -> None:
        """Print a warning on stderr, unless it was printed within `PAUSE`."""
        now = time.monotonic()
        if now >= self._warned.get(line, -PAUSE) + PAUSE:
            self._warned[line] = now
            print(f"WARNING: {line}", file=sys.stderr, flush=True)


def serve(cfg: DrawConfig) -> None:
    """Serve the page until the process is interrupted.

    Raise a UserError if the first network or the port cannot be used.
    """
    torch.set_num_threads(1)
    entries = find_networks(cfg.outputs, cfg.checkpoint)
    load_network(next(iter(entries.values())).path)  # cached before the first request
    server = Server(cfg, entries, listen(cfg.host, cfg.port))
    address = url(cfg.host, server.server_address[1])
    print(f"draw a digit at {address} (Ctrl-C ends)", flush=True)
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if cfg.open and has_screen:  # its request waits in the listener's queue
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    try:
        server.serve_forever()
    finally:  # Python aborts if a thread computes at exit
        server.predicting.acquire(timeout=5)


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on `port`; None: 8000 or, if taken, a free one. Raise a UserError if that fails."""
    named = f"host={host}" if port is None else f"host={host} port={port}"
    try:
        family, *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        try:
            chosen = DEFAULT_PORT if port is None else port
            return socket.create_server((host, chosen), family=family)
        except OSError:
            if port is not None:
                raise
            return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise UserError(f"{named}: cannot be listened on: {error.strerror}") from error


def url(host: str, port: int) -> str:
    """Return the address to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
