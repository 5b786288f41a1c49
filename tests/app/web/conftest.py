"""Fixtures for tests of app.draw: a trained run, its server, pages in Chromium."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.web.browser import open_page
from tests.networks import common_folder, folder_lock, small_mnist, train_once


class Server:
    """A process of `python -m app.draw`."""

    def __init__(self, outputs, log, *settings):
        self.log = Path(log).open("w")  # noqa: SIM115 (closed by stop)
        arguments = [f"outputs={outputs}", "open=false", "port=0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.draw", *arguments, *settings],
            cwd=outputs,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line.startswith("draw a digit at "), Path(log).read_text()
        self.address = line.split()[4]

    def stop(self, signal=signal.SIGINT):
        self.process.send_signal(signal)
        code = self.process.wait(30)
        self.process.stdout.close()
        self.log.close()
        return code


@pytest.fixture(scope="session")
def default_run(tmp_path_factory):
    """Return the folder of an exported run of the default recipe with ncrelu."""
    from app.config.schema import DataRoot, ExportConfig
    from app.export.export import export

    common = common_folder(tmp_path_factory)
    run, root = train_once(common, "ncrelu-standard"), small_mnist(common)
    with folder_lock(common):
        if not (run / "model.onnx").exists():
            export(ExportConfig(checkpoint=str(run), layout="function", data=DataRoot(str(root))))
    return run


@pytest.fixture(scope="session")
def server(default_run, tmp_path_factory):
    running = Server(default_run.parents[1], tmp_path_factory.mktemp("log") / "stderr")
    yield running
    running.stop()


@pytest.fixture
def visit(browser, server):
    """Return a function that opens the page; fail on requests to other hosts and console errors."""
    faults, contexts = [], []

    def open(**options):
        contexts.append(browser.new_context(**options))
        return open_page(contexts[-1], server.address, faults)

    yield open
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(visit):
    return visit(viewport={"width": 1280, "height": 860})
