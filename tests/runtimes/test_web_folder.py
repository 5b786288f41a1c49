"""The folder of `app.export_onnx web=true`, and its framing in JavaScript."""

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image, ImageDraw

from app.inference.preprocess import frame
from tests.app.web.browser import draw, open_page, settle
from tests.app.web.strokes import DIGITS
from tests.networks import KINDS, ROOT, common_folder, small_mnist, train_once
from tests.runtimes.networks import prepare
from tests.runtimes.runtimes import MissingError, onnxruntime_web

STATIC = ROOT / "app" / "export" / "web_page"
SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
const { frame } = await import(process.argv[2]);
const pictures = JSON.parse(readFileSync(process.argv[3]));
const framed = pictures.map((gray) => frame(Uint8Array.from(gray), process.argv[4]));
console.log(JSON.stringify(framed.map((image) => image && Array.from(image))));
"""


SIDE, PEN = 140, 10.5  # of a drawing, as in drawing.js
FINE = 8  # drawn larger and reduced, for smooth edges as in a browser


def drawings(count=200, seed=0):
    """Draw digits with random position, size and slant.

    Some are in a box, underlined, beside a dot, or cut off by the border.
    """
    random = np.random.default_rng(seed)
    for index in range(count):
        image = Image.new("L", (SIDE * FINE, SIDE * FINE))
        draw = ImageDraw.Draw(image)

        def stroke(points, draw=draw):
            places = [(x * SIDE * FINE, y * SIDE * FINE) for x, y in points]
            draw.line(places, fill=255, width=round(PEN * FINE), joint="curve")
            reach = PEN * FINE / 2
            for x, y in (places[0], places[-1]):
                draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=255)

        map = random.normal([[1, 0], [0, 1]], 0.15) * random.uniform(0.4, 1)
        shift = random.normal(0.5, 0.05 if index % 6 != 3 else 0.2, 2)
        for points in DIGITS[str(index % 10)]:
            stroke((np.array(points) - 0.5) @ map + shift)
        if index % 6 == 0:
            stroke([(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94), (0.06, 0.06)])
        elif index % 6 == 1:
            stroke([(0.1, 0.94), (0.9, 0.93)])
        elif index % 6 == 2:
            stroke([(0.1, 0.1), (0.1, 0.11)])
        yield np.asarray(image.reduce(FINE))


@pytest.mark.skipif(not shutil.which("node"), reason="no Node: apt-get install nodejs")
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_javascript_framing_matches_python(tmp_path, dataset):
    dot = np.zeros((SIDE, SIDE), np.uint8)
    dot[60:70, 60:71] = 255
    pictures = [*drawings(), np.zeros((SIDE, SIDE), np.uint8), dot]
    shutil.copy(STATIC / "framing.js", tmp_path)
    (tmp_path / "script.mjs").write_text(SCRIPT)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    pixels = [gray.ravel().tolist() for gray in pictures]
    (tmp_path / "pictures.json").write_text(json.dumps(pixels))
    command = ["node", "script.mjs", "./framing.js", "pictures.json", dataset]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    differences = []
    for gray, ours in zip(pictures, json.loads(done.stdout), strict=True):
        expected = frame(gray, dataset)
        assert (ours is None) == (expected is None)
        if ours is not None:
            differences.append(np.abs(expected.numpy().ravel().astype(int) - ours).mean())
    assert len(differences) >= 195
    assert np.mean(differences) <= 0.5
    # A centre of mass halfway between two pixels may be rounded either way, which shifts the digit.
    assert np.quantile(differences, 0.95) <= 1


@pytest.fixture(scope="module")
def npm():
    try:
        return onnxruntime_web()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def host():
    """Return a function that serves a folder and returns its address."""
    servers = []

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {
            ".mjs": "text/javascript",
            ".wasm": "application/wasm",
        }

        def log_message(self, *_):
            pass

    def serve(folder):
        handler = partial(Quiet, directory=folder)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def add_runtime(npm, folder):
    folder.mkdir()
    for file in npm.glob("ort-wasm-simd-threaded.*"):
        if file.name.count(".") == 1:
            shutil.copy(file, folder)
    shutil.copy(npm / "ort.wasm.min.mjs", folder)


@pytest.mark.browser
@pytest.mark.parametrize("preprocess", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_exported_page_recognises_digits(
    tmp_path_factory, tmp_path, npm, browser, host, preprocess
):
    from app.config.schema import DataRoot, ExportConfig
    from app.export.export import export

    folder = common_folder(tmp_path_factory)
    run = train_once(folder, "ncrelu-standard")
    shutil.copy(run / "best.pt", tmp_path)
    data = DataRoot(str(small_mnist(folder)))
    export(
        ExportConfig(
            checkpoint=str(tmp_path), data=data, layout="function", web=True, preprocess=preprocess
        )
    )
    add_runtime(npm, tmp_path / "web" / "ort")
    faults, answers = [], {}
    with browser.new_context(viewport={"width": 900, "height": 700}) as context:
        page = open_page(context, host(tmp_path / "web"), faults)
        for digit in DIGITS:
            page.keyboard.press("c")
            page.click("#clear") if page.is_enabled("#clear") else None
            draw(page, digit)
            answers[digit] = settle(page)
    assert sum(answer == digit for digit, answer in answers.items()) >= 9, answers
    assert faults == []


@pytest.mark.browser
def test_missing_runtime_shows_how_to_install_it(tmp_path_factory, tmp_path, browser, host):
    from app.config.schema import DataRoot, ExportConfig
    from app.export.export import export

    folder = common_folder(tmp_path_factory)
    run = train_once(folder, "ncrelu-standard")
    shutil.copy(run / "best.pt", tmp_path)
    data = DataRoot(str(small_mnist(folder)))
    export(ExportConfig(checkpoint=str(tmp_path), data=data, layout="function", web=True))
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(host(tmp_path / "web"))
        page.locator("#message", has_text="npm install onnxruntime-web").wait_for()


FAILING = """// onnxruntime-web that fails on demand
export const env = { wasm: {} };
export class Tensor {}
async function run() {
  if (window.failing) throw new Error("out of memory");
  return { logits: { data: Float32Array.from({ length: 10 }, (_, index) => index) } };
}
export const InferenceSession = { create: async () => ({ run }) };
"""


@pytest.mark.browser
def test_failed_run_is_shown_and_the_next_drawing_answered(
    tmp_path_factory, tmp_path, browser, host
):
    from app.export.web_folder import write_web_folder
    from app.inference.onnx_runtime import load_onnx

    case = prepare(common_folder(tmp_path_factory), "separable", "standard")
    write_web_folder(tmp_path, b"", load_onnx(case.path), "./ort/")
    (tmp_path / "ort").mkdir()
    (tmp_path / "ort" / "ort.wasm.min.mjs").write_text(FAILING)
    faults = []
    with browser.new_context() as context:
        page = open_page(context, host(tmp_path), faults)
        page.evaluate("window.failing = true")
        draw(page, "1")
        page.locator(".problem", has_text="out of memory").wait_for(timeout=5000)
        assert settle(page) == ""
        page.evaluate("window.failing = false")
        draw(page, "0")
        assert settle(page) == "9"
        assert page.locator(".problem").text_content() == ""
    assert faults == []


IN_BROWSER = """async ({ model, batch }) => {
  const ort = await import('/ort/ort.wasm.min.mjs');
  ort.env.wasm.wasmPaths = '/ort/';
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(model);
  const images = new Float32Array(await (await fetch('images.bin')).arrayBuffer());
  const logits = [];
  for (let start = 0; start < images.length; start += batch * 784) {
    const part = images.slice(start, start + batch * 784);
    const tensor = new ort.Tensor('float32', part, [part.length / 784, 1, 28, 28]);
    logits.push(...(await session.run({ [session.inputNames[0]]: tensor })).logits.data);
  }
  return logits;
}"""


@pytest.mark.browser
@pytest.mark.parametrize(
    "kind",
    [  # test_runtimes.py runs all of them in Node, in the same wasm
        pytest.param(kind, marks=[] if kind in ("separable", "lltm") else pytest.mark.exhaustive)
        for kind in KINDS
    ],
)
def test_onnxruntime_web_in_the_browser_matches_torch(
    tmp_path_factory, tmp_path, npm, browser, host, kind
):
    add_runtime(npm, tmp_path / "ort")
    (tmp_path / "index.html").write_text("<!doctype html><link rel=icon href=data:,>")
    cases = [prepare(common_folder(tmp_path_factory), kind, x) for x in ("function", "standard")]
    cases[0].images.tofile(tmp_path / "images.bin")
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(host(tmp_path))
        for case in cases:
            shutil.copy(case.path, tmp_path)
            found = page.evaluate(IN_BROWSER, {"model": case.path.name, "batch": 250})
            logits = np.array(found, np.float32).reshape(case.logits.shape)
            assert (logits.argmax(1) != case.logits.argmax(1)).sum() == 0
            np.testing.assert_allclose(logits, case.logits, atol=1e-4, rtol=0)
