"""Schemas of checkpoints, exported files and run folders."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Json, model_validator
from pydantic.dataclasses import dataclass

from app.config.schema import Count, DatasetName, Seed

CLASSES = 10  # of every data set
# of a finished run
RESULTS = (
    "test_accuracy",
    "val_accuracy",
    "parameters",
    "training_seconds",
    "images_per_second",
)


def _printable(value: str) -> str:
    if not value.isprintable() or not value.strip():  # control characters drive the terminal
        raise ValueError("Input should be printable text")
    return value


def _distinct(values: list[str]) -> list[str]:
    if len({*values}) < len(values):
        raise ValueError("Input should have different names")
    return values


ClassName = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_printable)]
ClassNames = Annotated[
    list[ClassName],
    Field(min_length=CLASSES, max_length=CLASSES),
    AfterValidator(_distinct),
]
# Types that are not strict also accept text, as in the metadata of an exported file.
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
StrictFraction = Annotated[Fraction, Field(strict=True)]
Deviation = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


@dataclass(kw_only=True)
class DataDescription:
    """The data set that a network was trained on."""

    name: DatasetName
    classes: ClassNames
    mean: Fraction  # of the training pixels in [0, 1]
    std: Deviation
    fallback_from: DatasetName | None = None  # the requested data set, if `name` replaces it


@dataclass(kw_only=True)
class TrainingData(DataDescription):
    """The data set of a checkpoint and its split."""

    val_size: Count
    split_seed: Seed


@dataclass(kw_only=True)
class Metadata(DataDescription):
    """The metadata of an exported file that commands read; all values are strings."""

    name: Annotated[DatasetName, Field(alias="dataset")]
    classes: Json[ClassNames]


@dataclass
class Summary:
    """The fields of `summary.json` that commands read; a finished run has all `RESULTS`."""

    status: Literal["finished", "unfinished", "interrupted", "failed"] = "unfinished"
    error: Annotated[str, Field(strict=True)] = ""
    dataset: DatasetName | None = None
    val_size: Count | None = None
    total_epochs: Count | None = None
    test_accuracy: StrictFraction | None = None
    val_accuracy: StrictFraction | None = None
    parameters: NonNegativeInt | None = None
    training_seconds: NonNegativeFloat | None = None
    images_per_second: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> "Summary":
        missing = [key for key in RESULTS if getattr(self, key) is None]
        if self.status == "finished" and missing:
            raise ValueError(f"a finished run without {missing[0]}")
        return self


@dataclass
class DataSettings:
    """The group `data` of `.hydra/config.yaml`."""

    name: DatasetName = "mnist"


@dataclass
class RunSettings:
    """The groups of `.hydra/config.yaml` that commands read; other keys are kept, not checked."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataSettings = field(default_factory=DataSettings)
