"""Compile a checkpoint by AOTInductor, for C++ programs without Python."""

import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from app.config.errors import RunError, one_line
from app.config.schema import ExportConfig, Pt2Config
from app.data.datasets import load_test_split
from app.export.export import silenced
from app.export.graph import BATCH, VERSIONS, Deployment
from app.export.outputs import check_files, write_with_card
from app.export.parity import Parity, check_parity, compare
from app.inference.predictor import TorchPredictor, load_torch
from app.inference.preprocess import SIDE
from app.models import describe_model
from app.runs.folder import data_root, find_checkpoint

BATCH_SIZE = 1000


def export_pt2(cfg: Pt2Config) -> None:
    """Compile a checkpoint for the CPU; raise a RunError if that fails or the logits differ."""
    original = load_torch(cfg.checkpoint or find_checkpoint(cfg.outputs))
    original.any_size = False  # compiled for SIDE × SIDE images
    path = Path(cfg.file or original.folder / "model.pt2")
    card = path.with_name(f"{path.stem}-pt2.md")
    check_files({path: card}, ".pt2", typed=cfg.file is not None)
    test = load_test_split(original.data.name, data_root(original.folder, cfg.data.root))
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / path.name
        with silenced():
            compile_network(original, cfg, package)
        network = torch._inductor.aoti_load_package(str(package))

        def compute_logits(images: Tensor) -> Tensor:
            inputs = images if cfg.preprocess else original.normalize(images)
            outputs = (network(part) for part in inputs.split(BATCH_SIZE))
            return torch.cat([y if isinstance(y, Tensor) else y[0] for y in outputs])

        parity = compare(compute_logits, original, test)
        try:
            check_parity(parity, exact=True)
        except RunError as error:
            raise RunError(f"{path} is not written: {error}") from error
        content = package.read_bytes()
    write_with_card(path, content, card, write_card(path.name, content, original, cfg, parity))
    print(f"compiled and torch: {parity}\nwrote {path}\nwrote {card}")


def compile_network(original: TorchPredictor, cfg: Pt2Config, package: Path) -> None:
    """Write the compiled network, with dynamic batch size of at least 2, to `package`."""
    settings = ExportConfig(preprocess=cfg.preprocess, postprocess=cfg.postprocess)
    module = Deployment(original, settings).eval()
    dtype = torch.uint8 if cfg.preprocess else torch.float32
    example = torch.zeros(2, 1, SIDE, SIDE, dtype=dtype)
    sizes = ({0: torch.export.Dim(BATCH)},)
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=sizes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    except Exception as error:  # compilers fail in many ways
        raise RunError(f"AOTInductor cannot compile the network: {one_line(error)}") from error


def write_card(
    name: str, content: bytes, original: TorchPredictor, cfg: Pt2Config, parity: Parity
) -> str:
    """Return the card of the compiled file as Markdown."""
    image = "uint8 pixels, 0 to 255, bright on black"
    if not cfg.preprocess:
        image = f"float32, (pixels / 255 - {original.data.mean:.6f}) / {original.data.std:.6f}"
    outputs = "logits" + (", probabilities, class" if cfg.postprocess else "")
    facts = {
        "file": f"{len(content):,} bytes, for {platform.machine()} processors like this one",
        "needs": f"libtorch {VERSIONS['torch']}, and the operators' library ops/_C.abi3.so",
        "input": f"[batch, 1, {SIDE}, {SIDE}], batch at least 2: {image}",
        "outputs": f"{outputs}; classes: {', '.join(original.data.classes)}",
        "accuracy": f"{parity.accuracy:.2%} of {parity.images:,} test images",
        "parity": str(parity),
    }
    lines = [
        f"# {name}\n\n{describe_model(original.config)}, trained on {original.data.name}.\n",
        "| | |\n| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items()),
        f"\n`scripts/run_pt2.cpp` runs it without Python: `run_pt2 _C.abi3.so {name}"
        f"{' uint8' if cfg.preprocess else ''} < images`.\n\nSet the environment variable "
        "`AOTI_RUNTIME_CHECK_INPUTS=1` in programs of your own: otherwise AOTInductor does not "
        "check dtype and sizes of the input, and may read outside of it.\n",
    ]
    return "\n".join(lines)
