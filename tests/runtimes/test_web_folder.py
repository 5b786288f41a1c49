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
const framed = pictures.map(({ dataset, ...picture }) => frame(picture, dataset));
console.log(JSON.stringify(framed.map((image) => image && Array.from(image))));
"""


def drawings(count=200, seed=0):
    """Draw digits with random position, size, slant, pen width and shade.

    Some are in a box, underlined, beside a blot or in a shadow; or the border cuts off a stroke.
    """
    random = np.random.default_rng(seed)
    for index in range(count):
        side = int(random.integers(60, 200))
        paper, ink = (0, int(random.integers(120, 256)))
        if index % 3 == 0:  # dark on light
            paper, ink = int(random.integers(180, 256)), int(random.integers(0, 90))
        image = Image.new("L", (side, int(random.integers(60, 200))), paper)
        map = random.normal([[1, 0], [0, 1]], 0.15) * random.uniform(0.5, 1)
        shift = random.normal(0.5, 0.05, 2)
        for points in DIGITS[str(index % 10)]:
            moved = (np.array(points) - 0.5) @ map + shift
            places = [tuple(point) for point in moved * image.size]
            width = max(1, int(side * random.uniform(0.02, 0.12)))
            ImageDraw.Draw(image).line(places, fill=ink, width=width, joint="curve")
        add = ImageDraw.Draw(image)
        right, bottom = image.width - 1, image.height - 1
        if index % 7 == 0:
            add.rectangle((3, 3, right - 3, bottom - 3), outline=ink, width=2)
        elif index % 7 == 1:
            add.line((8, bottom - 4, right - 8, bottom - 5), fill=ink, width=2)
        elif index % 7 == 2:
            add.ellipse((2, 2, 10, 9), fill=ink)
        elif index % 7 == 3:
            add.rectangle((0, 0, 4, bottom), fill=ink)
        picture = np.asarray(image)
        if index % 7 == 4:  # a band of shadow
            shadow = np.zeros(picture.shape, bool)
            shadow[:, image.width // 3 : image.width // 2] = True
            picture = np.where(shadow, picture // 2, picture)
        yield picture


@pytest.mark.skipif(not shutil.which("node"), reason="no Node: apt-get install nodejs")
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_javascript_framing_matches_python(tmp_path, dataset):
    dot = np.zeros((30, 30), np.uint8)
    dot[10:14, 12:17] = 255
    pictures = [*drawings(), np.zeros((30, 30), np.uint8), dot]
    (tmp_path / "script.mjs").write_text(SCRIPT)
    for name in ("framing.js", "paper.js", "strokes.js"):
        shutil.copy(STATIC / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "pictures.json").write_text(
        json.dumps(
            [
                {
                    "width": gray.shape[1],
                    "height": gray.shape[0],
                    "data": gray.ravel().tolist(),
                    "dataset": dataset,
                }
                for gray in pictures
            ]
        )
    )
    command = ["node", "script.mjs", "./framing.js", "pictures.json"]
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
        page.locator("#message", has_text="out of memory").wait_for(timeout=5000)
        assert settle(page) == ""
        page.evaluate("window.failing = false")
        draw(page, "0")
        assert settle(page) == "9"
        assert page.locator("#message").text_content() == ""
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
