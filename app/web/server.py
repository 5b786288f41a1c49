"""The server of `python -m app.draw`: one page and a JSON API."""

import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

import torch

from app.config.errors import UserError
from app.config.schema import DrawConfig
from app.web.handler import Handler
from app.web.networks import find_networks, load_network

DEFAULT_PORT = 8000


class Server(ThreadingTCPServer):
    """A server on `port`, with a thread for each connection; raise an OSError if that fails."""

    # not HTTPServer, which asks for the host's name: that may take seconds
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def __init__(self, cfg: DrawConfig, networks: dict[str, Path], port: int) -> None:
        self.networks = networks  # by id
        self.host, self.outputs, self.first = cfg.host, cfg.outputs, cfg.checkpoint
        self.predicting = threading.Lock()  # one core: a second does not speed up a single image
        self.address_family, *_ = socket.getaddrinfo(cfg.host, None, type=socket.SOCK_STREAM)[0]
        super().__init__((cfg.host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, except for connections that were closed, by the client or Ctrl-C."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(cfg: DrawConfig) -> None:
    """Serve the page until the process is interrupted.

    Raise a UserError if the first network or the port cannot be used.
    """
    torch.set_num_threads(1)
    networks = find_networks(cfg.outputs, cfg.checkpoint)
    load_network(next(iter(networks.values())))  # cached before the first request
    server = listen(cfg, networks)
    address = url(cfg.host, server.server_address[1])
    print(f"draw a digit at {address} (Ctrl-C ends)", flush=True)
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if cfg.open and has_screen:  # its request waits in the queue
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    try:
        server.serve_forever()
    finally:  # Python aborts if a thread computes at exit
        server.predicting.acquire(timeout=5)


def listen(cfg: DrawConfig, networks: dict[str, Path]) -> Server:
    """Listen on `cfg.port`; None: 8000 or, if taken, a free one. Raise a UserError on failure."""
    ports = (DEFAULT_PORT, 0) if cfg.port is None else (cfg.port,)
    for port in ports:
        try:
            return Server(cfg, networks, port)
        except OSError as error:
            failure = error
    named = f"host={cfg.host}" + ("" if cfg.port is None else f" port={cfg.port}")
    raise UserError(f"{named}: cannot be listened on: {failure.strerror}") from failure


def url(host: str, port: int) -> str:
    """Return the address to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
