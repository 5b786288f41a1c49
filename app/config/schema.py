"""The schema that conf/ must satisfy: every key, its type, its default and what it may be.

Nothing here imports torch, so that `--help` and a mistyped key answer at once.
"""
# ruff: noqa: RUF009 (the functions called for defaults make fields)

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.config.errors import UserError

T = TypeVar("T")
Flag = Any  # bool, or null too: where that is written, OmegaConf takes any number for one
DATASETS = ("mnist", "fashion_mnist", "kmnist", "qmnist", "digits")


@dataclass(frozen=True)
class Rule:
    """What a value may be: the words for an error message, the test, and what it then becomes."""

    allowed: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _key(default: Any, *rule: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(*rule)})


def _choice(default: Any, *choices: Any) -> Any:
    words = ", ".join("null" if choice is None else str(choice).lower() for choice in choices)
    kinds = {type(choice) for choice in choices}  # or 1 would do for True
    return _key(default, f"choose from {words}", lambda v: type(v) in kinds and v in choices)


def _integer(default: int | None, least: int) -> Any:
    key = _optional if default is None else _key
    return key(default, f"must be an integer, at least {least}", lambda value: value >= least)


def _seed() -> Any:
    return _key(0, "must be an integer from 0 to 4294967295", lambda value: 0 <= value < 2**32)


def _number(default: float, allowed: str, accepts: Callable[[float], bool]) -> Any:
    return _key(
        default,
        f"must be a number {allowed}",
        lambda value: math.isfinite(value) and accepts(value),
    )


def _path(default: str | None) -> Any:
    def expand(value: str | None) -> str | None:
        return value and os.path.expanduser(value)  # noqa: PTH111 (Path would drop a leading ./)

    return _key(default, "must be a path", lambda v: v is None or v.strip() != "", expand)


def _device() -> Any:
    pattern = re.compile(r"auto|cpu|cuda(:\d+)?")
    return _key("auto", "choose from auto, cpu, cuda, cuda:N", lambda v: bool(pattern.fullmatch(v)))


def _optional(default: Any, allowed: str, accepts: Callable[[Any], bool]) -> Any:
    return _key(default, f"{allowed}, or null", lambda value: value is None or accepts(value))


def _is_port(value: int) -> bool:
    return 0 <= value < 2**16


@dataclass
class ModelConfig:
    """The network, and a LeNet's activation, how its convolutions are built, what follows them."""

    act: str = _choice("relu", "relu", "gelu", "ncrelu")
    conv: str = _choice("standard", "standard", "depthwise", "involution")
    head: str = _choice("fc", "fc", "gap")
    name: str = _choice("lenet", "lenet", "lltm")


def choices_of(network: str) -> tuple[str, ...]:
    """The keys of `ModelConfig` that a network has a choice of."""
    return ("act", "conv", "head") if network == "lenet" else ()


@dataclass
class DataRoot:
    """Where data sets lie on disk."""

    root: str = _path("data")


@dataclass
class DataConfig(DataRoot):
    """The data set, how its training part is split, and whether its images may be warped."""

    name: str = _choice("mnist", *DATASETS)
    fallback: str | None = _choice("digits", "digits", None)
    val_size: int = _integer(5000, least=1)
    split_seed: int = _seed()
    augment: Flag = _choice(True, True, False)


@dataclass
class AugmentConfig:
    """The largest random distortion of a training image, to either side; all 0: none."""

    rotation: float = _number(0.0, "of degrees from 0 to 180", lambda value: 0 <= value <= 180)
    shift: float = _number(0.0, "of pixels from 0 to 28", lambda value: 0 <= value <= 28)
    scale: float = _number(0.0, "from 0 to below 1", lambda value: 0 <= value < 1)
    shear: float = _number(0.0, "of degrees from 0 to below 90", lambda value: 0 <= value < 90)


@dataclass
class OptimConfig:
    """The optimiser, under a one-cycle rate: up to `lr` over `warmup` of the steps, then down.

    `ema` is the share that the average of the weights keeps in a step; 0: no average.
    """

    name: str = _choice("muon", "adamw", "muon")
    lr: float = _number(0.02, "above 0", lambda value: value > 0)
    weight_decay: float = _number(0.05, "of at least 0", lambda value: value >= 0)
    warmup: float = _number(0.3, "above 0 and below 1", lambda value: 0 < value < 1)
    label_smoothing: float = _number(0.1, "from 0 to below 1", lambda value: 0 <= value < 1)
    ema: float = _number(0.0, "from 0 to below 1", lambda value: 0 <= value < 1)


@dataclass
class TrainerConfig:
    """How long to train, in what portions and precision, and how often to note where it is.

    `epochs=None`: 2, or of a small data set as many as show 12,000 images.
    A checkpoint is written after each epoch, and `checkpoint_steps` or `checkpoint_seconds` after
    the one before. `compile="auto"` captures a step on CUDA and replays it; True has torch.compile
    make its network's kernels first; False does neither.
    """

    epochs: int | None = _integer(None, least=1)
    batch_size: int = _integer(128, least=1)
    log_every: int = _integer(50, least=1)
    checkpoint_steps: int | None = _integer(None, least=1)
    checkpoint_seconds: float | None = _optional(
        30.0, "must be a number above 0", lambda value: value > 0 and math.isfinite(value)
    )
    precision: str = _choice("fp32", "fp32", "bf16", "fp16", "fp64")
    compile: Any = _choice("auto", "auto", True, False)


@dataclass
class TrainConfig:
    """Everything that `python -m app.train` reads."""

    resume: str | None = _path(None)
    recipe: str = _choice("fast", "fast", "best", "gap")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = _seed()
    device: str = _device()
    outputs: str = _path("outputs")


@dataclass
class PredictConfig:
    """Everything that `python -m app.predict` reads."""

    checkpoint: str | None = _path(None)
    runtime: str = _choice("torch", "torch", "onnx")
    input: str | None = _path(None)
    invert: Flag = _choice(None, None, True, False)
    frame: Flag = _choice(True, True, False)
    format: str = _choice("table", "table", "csv", "json")
    data: DataRoot = field(default_factory=DataRoot)
    device: str = _device()
    outputs: str = _path("outputs")


@dataclass
class ExportConfig:
    """Everything that `python -m app.export_onnx` reads."""

    checkpoint: str | None = _path(None)
    file: str | None = _path(None)
    exporter: str | None = _choice(None, "symbolic", "dynamo", None)
    layout: str | None = _choice(None, "function", "standard", "both", None)
    opset: int = _integer(18, least=17)
    preprocess: Flag = _choice(False, True, False)
    postprocess: Flag = _choice(False, True, False)
    precision: str = _choice("fp32", "fp32", "fp16")
    quantize: str | None = _choice(None, "int8", None)
    web: Flag = _choice(False, True, False)
    web_runtime: str = _key("./ort/", "must be an address or a path", lambda v: v.strip() != "")
    data: DataRoot = field(default_factory=DataRoot)
    outputs: str = _path("outputs")


@dataclass
class DrawConfig:
    """Everything that `python -m app.draw` reads."""

    checkpoint: str | None = _path(None)
    host: str = _key("127.0.0.1", "must be an address or a name", lambda value: value.strip() != "")
    port: int | None = _optional(None, "must be an integer from 0 to 65535", _is_port)
    open: Flag = _choice(True, True, False)
    data: DataRoot = field(default_factory=DataRoot)
    outputs: str = _path("outputs")


def from_mapping(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build `schema` from nested plain values, checking each against its rule.

    Args:
        schema: One of the dataclasses above.
        values: The values by key; a key that is left out keeps its default.
        prefix: Dotted path of `values`, for messages.

    Raises:
        UserError: An unknown key or a value that is not allowed; names key, value and choices.
    """
    fields = {item.name: item for item in dataclasses.fields(schema)}  # type: ignore[arg-type]
    built: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown_key(f"{prefix}{name}", value, schema)
        kind = fields[name].type
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{name}={shown(value)}: {allowed(schema, name)}")
            built[name] = from_mapping(kind, value, f"{prefix}{name}.")
        elif _accepts(fields[name].metadata["rule"], value):
            built[name] = fields[name].metadata["rule"].convert(value)
        else:
            raise UserError(f"{prefix}{name}={shown(value)}: {allowed(schema, name)}")
    return schema(**built)


def allowed(schema: type, key: str) -> str:
    """What the value at the dotted `key` of `schema` may be, in words."""
    head, _, rest = key.partition(".")
    kind = {item.name: item for item in dataclasses.fields(schema)}[head]
    if not dataclasses.is_dataclass(kind.type):
        return str(kind.metadata["rule"].allowed)
    assert isinstance(kind.type, type)
    if rest:
        return allowed(kind.type, rest)
    return f"holds the keys {', '.join(item.name for item in dataclasses.fields(kind.type))}"


def unknown_key(key: str, value: Any, schema: type) -> UserError:
    """The error for a key that `schema`, the part of the configuration it is in, does not have."""
    keys = ", ".join(sorted(item.name for item in dataclasses.fields(schema)))
    return UserError(f"{key}={shown(value)}: unknown key, choose from {keys}")


def shown(value: Any) -> str:
    """A value as one would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).removesuffix(".0")


def _accepts(rule: Rule, value: Any) -> bool:
    try:
        return bool(rule.accepts(value))
    except (TypeError, AttributeError):  # a type that the rule cannot compare
        return False
