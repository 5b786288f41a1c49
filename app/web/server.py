"""The server of `python -m app.draw`: one page and a JSON API."""

import asyncio
import dataclasses
import os
import socket
import threading
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from pydantic import Field
from pydantic.dataclasses import dataclass
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from app.config.errors import UserError
from app.config.schema import DrawConfig, from_mapping
from app.web.answer import predict_picture, read_picture
from app.web.guard import Guard
from app.web.log import log_config
from app.web.networks import Entry, find_networks, load_network

PAGE = Path(__file__).parent / "page"
DEFAULT_PORT = 8000
MAX_BODY = 2**20  # bytes
# Connections that wait to be accepted. At the limit of open files asyncio logs this many failures,
# then pauses for a second.
BACKLOG = 32


@dataclass
class PictureOptions:
    """The options of a request for a prediction."""

    width: Annotated[int, Field(gt=0)] | None = None  # row length of gray bytes; None: PNG


def serve(cfg: DrawConfig) -> None:
    """Serve the page until the process is interrupted.

    Raise a UserError if no network is found, or if the first one or the port cannot be used.
    """
    entries = find_networks(cfg.outputs, cfg.checkpoint)
    load_network(next(iter(entries.values())).path)  # cached before the first request
    listener = listen(cfg.host, cfg.port)
    address = url(cfg.host, listener.getsockname()[1])
    print(f"draw a digit at {address} (Ctrl-C ends)", flush=True)
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if cfg.open and has_screen:  # its request waits in the listener's queue
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(cfg, entries),
            backlog=BACKLOG,
            log_config=log_config(),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    server.run(sockets=[listener])
    raise KeyboardInterrupt  # uvicorn returns where the process inherited SIG_IGN


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on `port`; None: 8000 or, if taken, a free one. Raise a UserError if that fails."""
    named = f"host={host}" if port is None else f"host={host} port={port}"
    try:
        family, *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        try:
            chosen = DEFAULT_PORT if port is None else port
            listener = socket.create_server((host, chosen), family=family)
        except OSError:
            if port is not None:
                raise
            listener = socket.create_server((host, 0), family=family)
        # asyncio sets it only on sockets with an explicit protocol; else a response waits 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UserError(f"{named}: cannot be listened on: {error.strerror}") from error


def url(host: str, port: int) -> str:
    """Return the address to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def create_app(cfg: DrawConfig, entries: dict[str, Entry]) -> Starlette:
    """Build the application; `entries` are the networks at the start."""
    known = dict(entries)
    # one core: a second one does not speed up a single image
    thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def find_entry(request: Request) -> Entry:
        id = request.query_params.get("network", "")
        if id not in known:
            raise HTTPException(404, f"network={id}: not one of /api/networks")
        return known[id]

    async def list_networks(request: Request) -> JSONResponse:
        found = await run_in_threadpool(find_networks, cfg.outputs, cfg.checkpoint)
        known.clear()
        known.update(found)
        listed = map(dataclasses.asdict, found.values())
        return JSONResponse([{key: item[key] for key in item if key != "path"} for item in listed])

    async def predict(request: Request) -> JSONResponse:
        body, loop = await _read_body(request), asyncio.get_running_loop()
        path = find_entry(request).path
        options: PictureOptions = from_mapping(PictureOptions, dict(request.query_params))
        gray = read_picture(body, options.width)
        run = loop.run_in_executor(thread, predict_picture, path, gray)
        return JSONResponse(await run)

    api = [
        Route("/networks", list_networks),
        Route("/predict", predict, methods=["POST"]),
    ]
    return Starlette(
        routes=[
            Mount("/api", routes=api),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        middleware=[Middleware(Guard, host=cfg.host)],
        exception_handlers={UserError: _refuse, HTTPException: _refuse},
    )


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 400
    return JSONResponse({"error": getattr(error, "detail", str(error))}, status)


async def _read_body(request: Request) -> bytes:
    """Read the whole body, because unread data would reset the connection.

    Raise an HTTPException if it exceeds `MAX_BODY`.
    """
    body = bytearray()
    async for chunk in request.stream():
        if len(body) <= MAX_BODY:
            body += chunk
    if len(body) > MAX_BODY:
        raise HTTPException(413, f"more than {MAX_BODY:,} bytes")
    return bytes(body)
