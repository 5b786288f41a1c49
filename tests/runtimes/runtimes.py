"""Inference runtimes: logits of a file, and latency of one image on one thread."""

import math
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

from tests.networks import ROOT, folder_lock

BATCH = 250
NPM = ROOT / "build" / "npm"
ORT_WEB_VERSION = "1.30.0"
ORT_WEB = NPM / "node_modules" / "onnxruntime-web" / "dist"


class MissingError(Exception):
    """The runtime is not installed."""


def onnx_runtime(path):
    from app.inference.onnx_runtime import open_session

    session = open_session(path.read_bytes(), threads=1)
    (input,) = session.get_inputs()
    return lambda images: session.run(["logits"], {input.name: images})[0]


def openvino(path):
    if not find_spec("openvino"):
        raise MissingError("no OpenVINO: pip install openvino")
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    if any(op.get_type_name() == "Sigmoid" for op in model.get_ops()):  # as docs/runtimes.md says
        pools = [op.output(0) for op in model.get_ops() if op.get_type_name() == "MaxPool"]
        model.add_outputs(pools)
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(model, "CPU", settings)
    return lambda images: compiled(images)["logits"]


def tract(path):
    if not find_spec("tract"):
        raise MissingError("no tract: pip install tract")
    import tract

    model = tract.onnx().load(str(path)).into_model().into_runnable()
    return lambda images: model.run([images])[0].to_numpy()


def opencv(path):
    if not find_spec("cv2"):
        raise MissingError("no OpenCV: pip install opencv-python-headless")
    import cv2

    cv2.setNumThreads(1)
    net = cv2.dnn.readNetFromONNX(str(path))

    def predict(images):
        net.setInput(images)
        return net.forward("logits")

    return predict


def ncnn(path):
    if not (find_spec("ncnn") and find_spec("pnnx")):
        raise MissingError("no ncnn: pip install ncnn pnnx")
    import ncnn
    import pnnx

    with tempfile.TemporaryDirectory() as folder:  # pnnx writes beside its input
        copy = shutil.copy(path, f"{folder}/net.onnx")
        command = [pnnx.EXEC_PATH, copy, "inputshape=[1,1,28,28]", "fp16=0"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
        if done.returncode:
            raise RuntimeError(f"pnnx: {done.stdout}{done.stderr}")
        net = ncnn.Net()
        net.opt.num_threads = 1
        net.opt.use_packing_layout = False  # as docs/runtimes.md says
        net.opt.use_fp16_storage = net.opt.use_bf16_storage = False
        if net.load_param(f"{folder}/net.ncnn.param") or net.load_model(f"{folder}/net.ncnn.bin"):
            raise RuntimeError("ncnn refuses the network")

    def predict(images):
        return np.concatenate([predict_one(image) for image in images])

    def predict_one(image):
        with net.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(image).clone())
            return np.array(extractor.extract("out0")[1]).reshape(1, -1)

    return predict


def reference(path):
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(str(path))
    (name,) = model.input_names
    return lambda images: model.run(["logits"], {name: images})[0]


RUNTIMES = {
    "ONNX Runtime": (onnx_runtime, "onnxruntime"),
    "OpenVINO": (openvino, "openvino"),
    "tract": (tract, "tract"),
    "OpenCV": (opencv, "opencv-python-headless"),
    "ncnn": (ncnn, "ncnn"),
    "onnx reference evaluator": (reference, "onnx"),
}
LAYOUTS = {  # supported layouts
    "ONNX Runtime": ("function", "standard", "int8"),
    "onnxruntime-web": ("function", "standard", "int8"),
    "OpenVINO": ("standard", "int8"),
    "tract": ("standard", "int8"),
    "OpenCV": ("standard",),
    "ncnn": ("standard",),
    "onnx reference evaluator": ("function",),  # 20 ms for an image
}
REFUSED = {("ncnn", "involution")}  # (runtime, network)


def run(runtime, path, images, folder, turns=0):
    """Return logits [N, classes] and the latency of one image on one thread in µs.

    Args:
        runtime: A key of `LAYOUTS`.
        path: The model.
        images: float32 [N, 1, 28, 28].
        folder: For temporary files.
        turns: Number of medians, of which the least counts; 0 measures no latency.
    """
    if runtime == "onnxruntime-web":
        return _run_in_node(path, images, folder, turns)
    predict = RUNTIMES[runtime][0](path)
    parts = [predict(images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
    count = 20 if runtime == "onnx reference evaluator" else 100
    medians = []
    for _ in range(turns):
        times = []
        for index in range(count):
            start = time.perf_counter()
            predict(images[index : index + 1])
            times.append(1e6 * (time.perf_counter() - start))
        medians.append(median(times))
    return np.concatenate(parts), min(medians, default=math.inf)


def version_of(runtime):
    return ORT_WEB_VERSION if runtime == "onnxruntime-web" else version(RUNTIMES[runtime][1])


def onnxruntime_web():
    """Return the folder of onnxruntime-web; install it by npm if it is missing."""
    if not all(map(shutil.which, ("node", "npm"))):
        raise MissingError("no Node: apt-get install nodejs npm")
    NPM.mkdir(parents=True, exist_ok=True)
    with folder_lock(NPM):
        if not (ORT_WEB / "ort.wasm.min.mjs").exists():
            package = f"onnxruntime-web@{ORT_WEB_VERSION}"
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(NPM), package]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            if done.returncode:
                raise MissingError(f"{package} cannot be installed: {done.stderr[-300:]}")
    return ORT_WEB


def _run_in_node(path, images, folder, turns):
    files = [str(Path(folder) / name) for name in ("images.bin", "logits.bin")]
    images.tofile(files[0])
    script = Path(__file__).with_name("run_web.mjs")
    # V8's baseline compiler: the optimising one takes 2 s for ONNX Runtime
    flags = [] if turns else ["--liftoff-only"]
    done = subprocess.run(
        ["node", *flags, script, onnxruntime_web(), path, *files, str(BATCH), str(turns)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    logits = np.fromfile(files[1], np.float32).reshape(len(images), -1)
    return logits, float(done.stdout)
