import io
import json
import warnings
from dataclasses import dataclass

import onnx
import torch
from onnx.shape_inference import infer_shapes
from torch import nn

from app.config import ExportConfig
from app.data import Split
from app.errors import RunError
from app.files import write_atomically
from app.inference import TrainedModel, load_test_split, load_trained, onnx_runner, torch_runner
from ops.onnx import DOMAIN, VERSION, register_symbolics

OPSET = 18
TOLERANCE = 1e-4  # in logits, between torch and ONNX Runtime
INPUT, OUTPUT, BATCH = "image", "logits", "batch"


@dataclass
class Parity:
    """How an exported network compares with the original over labelled images.

    Attributes:
        images: How many.
        max_abs_difference: Largest difference of any logit.
        differing: How many predictions differ.
        accuracy: Of the exported network.
    """

    images: int
    max_abs_difference: float
    differing: int
    accuracy: float

    def __str__(self) -> str:
        return (
            f"max abs difference {self.max_abs_difference:.2g}, "
            f"{self.differing:,} of {self.images:,} predictions differ, "
            f"accuracy {self.accuracy:.2%}"
        )


def export(cfg: ExportConfig) -> None:
    """Export a checkpoint to `model.onnx` beside it, once the result has been checked.

    Raises:
        UserError: The checkpoint or its test images cannot be used.
        RunError: The result is not the network that went in; it is kept as `model.onnx.rejected`.
    """
    trained = load_trained(cfg.checkpoint, cfg.outputs)
    split = load_test_split(trained.checkpoint, cfg.data.root)
    path, rejected = trained.folder / "model.onnx", trained.folder / "model.onnx.rejected"
    model = convert(trained.module)
    describe(model, trained)
    try:
        model = check(model)
        parity = compare(model, trained, split)
    except Exception as error:  # of onnx, ONNX Runtime or ours: whatever is wrong with the model
        write_atomically(rejected, model.SerializeToString())
        raise RunError(f"{error}; the exported model is kept as {rejected}") from error
    onnx.helper.set_model_props(model, metadata(trained, parity))
    write_atomically(path, model.SerializeToString())
    rejected.unlink(missing_ok=True)
    print(f"onnx checker, shape inference: passed\nONNX Runtime and torch: {parity}\nwrote {path}")


def convert(module: nn.Module) -> onnx.ModelProto:
    """Convert a network of float32 [batch, 1, 28, 28] -> [batch, classes]; the batch is dynamic.

    The project's operators become nodes of the domain `lenet_ops`, each with its meaning in
    standard operators as a function in the model.
    """
    register_symbolics(OPSET)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning
        )
        torch.onnx.export(
            module,
            (torch.zeros(2, 1, 28, 28),),
            buffer,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_axes={INPUT: {0: BATCH}, OUTPUT: {0: BATCH}},
            custom_opsets={DOMAIN: VERSION},
        )
    return onnx.load_model_from_string(buffer.getvalue())


def describe(model: onnx.ModelProto, trained: TrainedModel) -> None:
    """Write into the model what its input and output are."""
    data = trained.checkpoint.data
    (image,), (logits,) = model.graph.input, model.graph.output
    image.doc_string = f"pixels / 255, less {data['mean']:.6f}, divided by {data['std']:.6f}"
    logits.doc_string = f"one a class: {', '.join(trained.classes)}"
    model.doc_string = model.graph.doc_string = f"LeNet for {data['name']}"


def check(model: onnx.ModelProto) -> onnx.ModelProto:
    """Check the model by onnx's rules.

    Returns:
        The model with the shape of every value, as onnx infers it.

    Raises:
        ValidationError, InferenceError: onnx's, where a rule is broken.
    """
    del model.graph.value_info[:]  # torch's guesses; strict inference must do without
    model = infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(model, full_check=True)
    return model


def compare(model: onnx.ModelProto, trained: TrainedModel, split: Split) -> Parity:
    """Run the exported network in ONNX Runtime beside the original in torch.

    Raises:
        RunError: A logit differs by more than `TOLERANCE`.
    """
    data = trained.checkpoint.data
    ours = onnx_runner(model.SerializeToString(), data["mean"], data["std"])(split.images)
    reference = torch_runner(trained, torch.device("cpu"))(split.images)
    predicted = ours.argmax(1)
    parity = Parity(
        images=len(split),
        max_abs_difference=(ours - reference).abs().max().item(),
        differing=int((predicted != reference.argmax(1)).sum()),
        accuracy=(predicted == split.labels).double().mean().item(),
    )
    if not parity.max_abs_difference <= TOLERANCE:  # NaN is not
        raise RunError(f"ONNX Runtime and torch differ by more than {TOLERANCE}: {parity}")
    return parity


def metadata(trained: TrainedModel, parity: Parity) -> dict[str, str]:
    """What the model's file says about its origin; numbers and lists as JSON."""
    checkpoint = trained.checkpoint
    data = checkpoint.data
    versions = checkpoint.versions | {"torch": str(torch.__version__), "onnx": onnx.__version__}
    values = {
        "dataset": data["name"],
        "fallback_from": data["fallback_from"],
        "classes": trained.classes,
        "mean": data["mean"],
        "std": data["std"],
        "test_accuracy": parity.accuracy,
        "model": checkpoint.model_config,
        "versions": versions,
    }
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if value is not None
    }
