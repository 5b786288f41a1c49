"""The server of app.draw: responses, errors, security headers, shutdown."""

import base64
import io
import json
import resource
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from app.web import handler
from app.web.handler import MAX_BODY
from tests.app.web.conftest import Server


@pytest.fixture
def ask(server):
    """Return a function that sends a request and returns status, headers and body."""

    def send(path, body=None, **headers):
        request = urllib.request.Request(server.address + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    return send


@pytest.fixture
def network(ask):
    return json.loads(ask("api/networks")[2])[0]["id"]


def drawing():
    gray = np.zeros((140, 140), np.uint8)
    gray[20:120, 60:75] = 255  # a one
    return gray


def test_page_and_modules_have_a_content_security_policy(ask):
    for path, kind in (("", "text/html"), ("main.js", "javascript"), ("style.css", "text/css")):
        status, headers, body = ask(path)
        assert (status, bool(body)) == (200, True)
        assert kind in headers["content-type"]
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_networks_are_listed(ask, default_run):
    (network,) = json.loads(ask("api/networks")[2])
    assert network["id"] == str(default_run / "best.pt")
    assert network["title"].startswith("lenet ncrelu standard fc · 9")


def test_drawing_matches_predict(ask, network, default_run):
    from app.inference.predictor import load_torch
    from app.inference.preprocess import frame

    image = frame(drawing(), "mnist")
    expected = load_torch(default_run).logits(image[None])[0].softmax(0)
    status, _, content = ask(f"api/predict?network={network}", drawing().tobytes())
    answer = json.loads(content)
    assert status == 200
    names, shares = zip(*answer["probabilities"], strict=True)
    assert "".join(names) == "0123456789"
    assert shares == pytest.approx(expected.tolist(), abs=1e-4)
    pixels = base64.b64decode(answer["pictures"][0][1].partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(pixels))), image[0])


def test_blank_picture_and_lone_dot_have_no_prediction(ask, network):
    dot = np.zeros((28, 28), np.uint8)
    dot[10:13, 10:13] = 255
    for body in (bytes(784), dot.tobytes()):
        status, _, content = ask(f"api/predict?network={network}", body)
        assert status == 200
        assert json.loads(content) == {"probabilities": [], "pictures": []}


PREDICT = "api/predict?network=NETWORK"
REFUSED = {
    "a foreign host": ("api/networks", None, {"Host": "evil.example"}, 403),
    "a foreign host with a known port": ("", None, {"Host": "evil.example:8000"}, 403),
    "no port": ("", None, {"Host": "127.0.0.1:abc"}, 403),
    "another address": ("", None, {"Host": "192.168.0.1"}, 403),
    "a foreign origin": (PREDICT, b"x", {"Origin": "http://evil.example"}, 403),
    "no origin": (PREDICT, b"x", {"Origin": "null"}, 403),
    "two megabytes": (PREDICT, bytes(2 * 2**20), {}, 413),
    "one byte too many": (PREDICT, bytes(MAX_BODY + 1), {}, 413),
    "nothing": (PREDICT, b"", {}, 400),
    "no picture": (PREDICT, b"<svg/>", {}, 400),
    "no square": (PREDICT, bytes(101), {}, 400),
    "a path upwards": ("api/predict?network=../../x", b"x", {}, 404),
    "no network": ("api/predict", b"x", {}, 404),
    "a file outside of the page": ("../server.py", None, {}, 404),
    "an encoded path upwards": ("%2e%2e/server.py", None, {}, 404),
    "GET of a prediction": (PREDICT, None, {}, 405),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_requests_are_rejected(ask, network, case):
    path, body, headers, expected = REFUSED[case]
    status, answer, content = ask(path.replace("NETWORK", network), body, **headers)
    assert status == expected
    error = json.loads(content)["error"]
    assert error and "\n" not in error and "input=" not in error
    assert answer["content-security-policy"]
    assert ask(f"api/predict?network={network}", drawing().tobytes())[0] == 200


def test_own_hosts_and_origin_are_accepted(ask, server):
    port = server.address.rstrip("/").rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9000"):
        assert ask("", None, Host=host, Origin=f"http://{host}")[0] == 200


RAW = {  # request, status
    "an invalid address": ("GET http://[ HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "a null byte": ("GET /%00 HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "a length of 5,000 digits": (
        f"POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: {'9' * 5000}\r\n\r\n",
        411,
    ),
    "no length": ("POST / HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    "a long header": (f"GET / HTTP/1.1\r\nHost: HOST\r\nX: {'x' * 70_000}\r\n\r\n", 431),
    "a long address": (f"GET /{'x' * 70_000} HTTP/1.1\r\nHost: HOST\r\n\r\n", 414),
    "an unknown version": ("GET / HTTP/2.0\r\nHost: HOST\r\n\r\n", 505),
    "many headers": ("GET / HTTP/1.1\r\nHost: HOST\r\n" + 101 * "X: x\r\n" + "\r\n", 431),
    "an unknown method": ("BREW / HTTP/1.1\r\nHost: HOST\r\n\r\n", 501),
}


@pytest.mark.parametrize("case", RAW)
def test_malformed_request_has_one_response(case, default_run, tmp_path, request):
    text, expected = RAW[case]
    server = Server(default_run.parents[1], tmp_path / "stderr")
    request.addfinalizer(server.stop)
    host, port = server.address[7:].rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        text += "GET / HTTP/1.1\r\nHost: HOST\r\n\r\n"  # must not be answered
        connection.sendall(text.replace("HOST", f"{host}:{port}").encode())
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read().decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.split()[1] == str(expected)
    assert json.loads(body)["error"]  # and nothing after it
    assert (tmp_path / "stderr").read_text() == ""


def test_head_has_the_headers_of_get(ask, server):
    for path in ("", "api/networks", "main.js"):
        request = urllib.request.Request(server.address + path, method="HEAD")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert (response.status, response.read()) == (200, b"")
            assert int(response.headers["content-length"]) == len(ask(path)[2])


def test_idle_connections_do_not_block_others(default_run, tmp_path):
    server = Server(default_run.parents[1], tmp_path / "stderr")
    used = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 10, used + 10))
    host, port = server.address[7:].rstrip("/").split(":")
    with ExitStack() as idle:
        for _ in range(20):
            idle.enter_context(socket.create_connection((host, int(port))))
        assert urllib.request.urlopen(server.address, timeout=20).status == 200
    assert server.stop() == 130


def test_lack_of_memory_is_reported_in_one_line(monkeypatch):
    """Without a process: the handler of one request."""

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(handler, "predict_drawing", fail)
    own = SimpleNamespace(host="127.0.0.1", networks={"x": Path("x")}, predicting=Lock())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        head = (
            "POST /api/predict?network=x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n\r\n"
        )
        theirs.sendall(head.encode() + bytes(4))
        monkeypatch.setattr(handler.Handler, "disable_nagle_algorithm", False)
        handler.Handler(ours, ("127.0.0.1", 0), own)
        answer = theirs.recv(2**16).decode()
    assert answer.split()[1] == "503"
    assert answer.endswith('{"error": "out of memory"}')


def test_aborted_upload_is_ignored(default_run, tmp_path):
    server = Server(default_run.parents[1], tmp_path / "stderr")
    host, port = server.address[7:].rstrip("/").split(":")
    head = f"POST /api/predict?network=x HTTP/1.1\r\nHost: {host}:{port}\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port))) as upload:
            upload.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
    assert urllib.request.urlopen(server.address, timeout=30).status == 200
    assert server.stop() == 130
    assert (tmp_path / "stderr").read_text() == "interrupted\n"


def test_interrupt_stops_the_server_with_open_connections(default_run, tmp_path):
    server = Server(default_run.parents[1], tmp_path / "stderr")
    host, port = server.address[7:].rstrip("/").split(":")
    with socket.create_connection((host, int(port))) as kept:  # keep-alive
        kept.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert kept.recv(20).startswith(b"HTTP/1.1 200")
        assert server.stop() == 130
    assert (tmp_path / "stderr").read_text() == "interrupted\n"


def test_interrupt_during_predictions(default_run, tmp_path):
    server = Server(default_run.parents[1], tmp_path / "stderr")
    id = json.loads(urllib.request.urlopen(server.address + "api/networks").read())[0]["id"]

    def ask_for_ever():
        with suppress(OSError, HTTPException):
            while True:
                address = f"{server.address}api/predict?network={id}"
                urllib.request.urlopen(address, drawing().tobytes(), timeout=30).read()

    clients = [Thread(target=ask_for_ever) for _ in range(8)]
    for client in clients:
        client.start()
    time.sleep(2)
    assert server.stop() == 130
    assert (tmp_path / "stderr").read_text() == "interrupted\n"
    for client in clients:
        client.join()


def test_damaged_network_is_reported_in_one_line(ask, default_run):
    damaged = default_run.parent / "damaged"
    damaged.mkdir()
    (damaged / "best.pt").write_bytes(b"PK")
    try:
        listed = [item["id"] for item in json.loads(ask("api/networks")[2])]
        (id,) = [id for id in listed if "damaged" in id]
        status, _, content = ask(f"api/predict?network={id}", drawing().tobytes())
        assert status == 400
        assert "damaged, or not a checkpoint" in json.loads(content)["error"]
    finally:
        (damaged / "best.pt").unlink()
        damaged.rmdir()
        ask("api/networks")
