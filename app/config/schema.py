"""The schema of conf/: every key with its type, default and limits. Does not import torch."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from app.config.errors import UserError

T = TypeVar("T")
DatasetName = Literal["mnist", "fashion_mnist", "kmnist", "qmnist", "digits"]
FORBID = ConfigDict(extra="forbid")


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("Input should not be blank")
    return value


def _path(value: str) -> str:
    return os.path.expanduser(_not_blank(value))  # noqa: PTH111 (Path would drop a leading ./)


def _latest(value: str) -> str | None:
    return None if value == "latest" else value


def _device(value: Any) -> Any:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(value)):
        raise ValueError("Input should be auto, cpu, cuda or cuda:N")
    return value


def _stages(value: list[list[int]]) -> list[list[int]]:
    if len(value) != 3 or not all(1 <= len(stage) <= 20 for stage in value):
        example = "[[16],[24,24],[40,48]]"
        raise ValueError(f"Input should be three lists of 1 to 20 channels, such as {example}")
    return value


# Hydra parses outputs=2026 as a number
Text = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_not_blank)]
Path = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_path)]
Network = Annotated[Path, AfterValidator(_latest)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, lt=1)]
Channels = Annotated[int, Field(strict=True, ge=1, le=1024)]
Stages = Annotated[list[list[Channels]], AfterValidator(_stages)]
Device = Annotated[str, BeforeValidator(_device)]


@dataclass(config=FORBID)
class LeNetConfig:
    """A LeNet: its activation, kind of convolution, and classifier."""

    act: Literal["relu", "gelu", "ncrelu"] = "relu"
    conv: Literal["standard", "depthwise", "involution"] = "standard"
    head: Literal["fc", "gap"] = "fc"
    name: Literal["lenet"] = "lenet"


@dataclass(config=FORBID)
class LLTMConfig:
    """A recurrent network (LLTM) over the rows of an image."""

    name: Literal["lltm"] = "lltm"


@dataclass(config=FORBID)
class SeparableConfig:
    """A network of depthwise separable convolutions: output channels of each, in three stages."""

    channels: Stages = dataclasses.field(
        default_factory=lambda: [[32], [72, 72, 72], [112, 112, 112]]
    )
    name: Literal["separable"] = "separable"


ModelConfig = Annotated[LeNetConfig | LLTMConfig | SeparableConfig, Field(discriminator="name")]
NETWORKS: dict[str, type[Any]] = {
    "lenet": LeNetConfig,
    "lltm": LLTMConfig,
    "separable": SeparableConfig,
}


@dataclass(config=FORBID)
class DataRoot:
    """The folder of the data sets; None: that of the run."""

    root: Path | None = None


@dataclass(config=FORBID)
class DataConfig:
    """The data set, its validation split, and whether to augment its images."""

    root: Path = "data"
    name: DatasetName = "mnist"
    fallback: Literal["digits", None] = "digits"
    val_size: Count = 5000
    split_seed: Seed = 0
    augment: StrictBool = True


@dataclass(config=FORBID)
class AugmentConfig:
    """The largest random distortion of a training image in either direction; 0: none.

    Rotation and shear are in degrees, shift in pixels, scale relative to the size.
    """

    rotation: Annotated[float, Field(strict=True, ge=0, le=180)] = 0.0
    shift: Annotated[float, Field(strict=True, ge=0, le=28)] = 0.0
    scale: Share = 0.0
    shear: Annotated[float, Field(strict=True, ge=0, lt=90)] = 0.0


@dataclass(config=FORBID)
class OptimConfig:
    """The optimiser and its one-cycle schedule: peak `lr` after the share `warmup` of the steps.

    `ema` is the decay of the exponential moving average of the weights; 0: no EMA.
    """

    name: Literal["adamw", "muon"] = "muon"
    lr: Positive = 0.02
    weight_decay: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.05
    warmup: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.3
    label_smoothing: Share = 0.1
    ema: Share = 0.0


@dataclass(config=FORBID)
class TrainerConfig:
    """Length, batch size and precision of training; intervals of logs and checkpoints.

    `epochs=None`: 2, or more to reach 12,000 images. `compile="auto"` captures a step as a CUDA
    graph; True compiles the network by torch.compile first; False does neither.
    """

    epochs: Count | None = None
    batch_size: Count = 128
    log_every: Count = 50
    checkpoint_steps: Count | None = None
    checkpoint_seconds: Positive | None = 30.0
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    compile: Literal["auto", True, False] = "auto"


@dataclass(config=FORBID)
class TrainConfig:
    """The configuration of `python -m app.train`."""

    resume: Path | None = None
    recipe: Literal["fast", "best", "gap", "tiny"] = "fast"
    model: ModelConfig = dataclasses.field(default_factory=LeNetConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    seed: Seed = 0
    device: Device = "auto"
    outputs: Path = "outputs"


@dataclass(config=FORBID)
class UseConfig:
    """The common settings of commands that use a network (None: the newest run's best)."""

    checkpoint: Network | None = None
    outputs: Path = "outputs"


@dataclass(config=FORBID)
class EvaluationConfig(UseConfig):
    """The common settings of commands that also use the test images."""

    data: DataRoot = dataclasses.field(default_factory=DataRoot)


@dataclass(config=FORBID)
class PredictConfig(EvaluationConfig):
    """The configuration of `python -m app.predict`."""

    runtime: Literal["torch", "onnx"] = "torch"
    input: Path | None = None
    invert: StrictBool | None = None
    frame: StrictBool = True
    format: Literal["table", "csv", "json"] = "table"
    device: Device = "auto"


@dataclass(config=FORBID)
class ExportConfig(EvaluationConfig):
    """The configuration of `python -m app.export_onnx`."""

    file: Path | None = None
    exporter: Literal["symbolic", "dynamo", None] = None
    layout: Literal["function", "standard", "both", None] = None
    opset: Annotated[int, Field(strict=True, ge=17)] = 18
    preprocess: StrictBool = False
    postprocess: StrictBool = False
    precision: Literal["fp32", "fp16"] = "fp32"
    quantize: Literal["int8", None] = None


@dataclass(config=FORBID)
class Pt2Config(EvaluationConfig):
    """The configuration of `python -m app.export_pt2`."""

    file: Path | None = None
    preprocess: StrictBool = False
    postprocess: StrictBool = False


@dataclass(config=FORBID)
class DrawConfig(UseConfig):
    """The configuration of `python -m app.draw`."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Field(strict=True, ge=0, lt=2**16)] | None = None
    open: StrictBool = True


@dataclass(config=FORBID)
class ReportConfig:
    """The configuration of `python -m app.report`."""

    folder: Path = "latest"
    outputs: Path = "outputs"


def from_mapping(schema: type[T] | Any, values: Mapping[str, Any], prefix: str = "") -> T:
    """Build `schema` from nested plain values; raise a UserError for a wrong key or value."""
    try:
        return cast(T, TypeAdapter(schema).validate_python(values))
    except ValidationError as error:
        first = error.errors()[0]
    key = prefix + ".".join(str(part) for part in first["loc"] if part not in NETWORKS)
    key = _shorten(printable(key))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "bool_type":
        message = "Input should be true or false"
    if first["type"] == "literal_error":  # in the syntax of the command line
        for python, yaml in (("True", "true"), ("False", "false"), ("None", "null")):
            message = message.replace(python, yaml)
    if first["type"] == "dataclass_type":
        keys = _allowed_keys(schema, (*first["loc"], ""))
        message = f"is a group, its keys are {', '.join(keys)}"
    if first["type"] == "unexpected_keyword_argument":
        message = unknown_key(key, _allowed_keys(schema, first["loc"]))
    integer = first["type"] == "int_type"  # 2.0 must not look like one
    value = first["input"]
    shown = str(value) if integer and isinstance(value, float) else format_value(value)
    if first["type"] in ("missing", "missing_argument"):
        raise UserError(f"{key} is missing")
    raise UserError(f"{key}={_shorten(shown)}: {message}")


def _allowed_keys(schema: Any, path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the dataclass that holds the last part of `path`."""
    for part in path[:-1]:
        if part in NETWORKS:
            schema = NETWORKS[str(part)]
        else:
            schema = {item.name: item.type for item in dataclasses.fields(schema)}[str(part)]
    return sorted(item.name for item in dataclasses.fields(schema))


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """Return the error message for the unknown, dotted `key`; `keys` are the known ones."""
    for network, schema in NETWORKS.items():
        if key in [f"model.{item.name}" for item in dataclasses.fields(schema)]:
            return f"is for model={network}{' or model=tiny' if network == 'separable' else ''}"
    allowed = ", ".join(sorted({*keys} - {"hydra", "name"}))  # the groups set `name`
    return "unknown key, " + (f"choose from {allowed}" if allowed else "none is allowed here")


def package_version() -> str:
    """Return the version of lenet-ops; "" if it runs from the sources, without installation."""
    try:
        return version("lenet-ops")
    except PackageNotFoundError:
        return ""


def counted(count: int, unit: str) -> str:
    """Format a number of units, as "1 run" and "2 runs"."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def format_value(value: Any) -> str:
    """Format a value in the syntax of the command line, with escapes for control characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = printable(str(value))
    return text.removesuffix(".0") if isinstance(value, float) else text


def printable(text: str) -> str:
    """Return `text` with escapes for control characters, which could drive the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def _shorten(text: str, length: int = 100) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
