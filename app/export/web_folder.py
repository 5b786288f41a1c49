"""Web folder of an exported network: the page of app.draw, which runs it by onnxruntime-web."""

import json
from pathlib import Path

from app.inference.onnx_runtime import OnnxPredictor
from app.runs.files import write_atomically
from app.runs.folder import WEB_SETTINGS

PAGE = Path(__file__).parents[1] / "web" / "page"  # of app.draw
STATIC = Path(__file__).parent / "web_page"  # replaces the requests to its server
MODEL = "model.onnx"
RUNTIME_FILES = "ort.wasm.min.mjs,ort-wasm-simd-threaded.mjs,ort-wasm-simd-threaded.wasm"


def write_web_folder(
    folder: Path, content: bytes, network: OnnxPredictor, runtime: str
) -> list[str]:
    """Write the folder for the exported model `content`; `network` is the same model, loaded.

    Return the commands that install onnxruntime-web at `runtime`, a URL or a path.
    """
    folder.mkdir(exist_ok=True)
    runtime = runtime.rstrip("/") + "/"
    install = install_lines(runtime)
    (input,) = network.session.get_inputs()
    settings = {
        "file": MODEL,
        "input": input.name,
        "raw": input.type == "tensor(uint8)",
        "mean": network.data.mean,
        "std": network.data.std,
        "classes": network.data.classes,
        "dataset": network.data.name,
        "runtime": runtime,
        "install": install,
    }
    # first: it marks the folder as ours, even if a later write fails
    write_atomically(folder / WEB_SETTINGS, json.dumps(settings, indent=2).encode())
    write_atomically(folder / MODEL, content)
    for file in (*PAGE.iterdir(), *STATIC.iterdir()):
        write_atomically(folder / file.name, file.read_bytes())
    return install


def install_lines(runtime: str) -> list[str]:
    """Return the commands that install onnxruntime-web at `runtime`; none for a URL."""
    if "://" in runtime:
        return []
    return [
        "npm install onnxruntime-web",
        f"mkdir -p {runtime} && cp node_modules/onnxruntime-web/dist/{{{RUNTIME_FILES}}} {runtime}",
    ]
