"""Start, save, restore and resume a training run."""

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.config.contents import DataDescription, TrainingData
from app.config.device import choose_threads, pick_device
from app.config.errors import UserError, check_writable, one_line
from app.config.schema import DataConfig, TrainConfig, format_value, from_mapping
from app.data.datasets import Dataset, load_dataset
from app.models import build_model, cpu_format
from app.runs.checkpoint import BEST, LAST, Checkpoint, load_checkpoint, save_checkpoint
from app.runs.folder import (
    CONFIG,
    LAUNCH,
    NON_HYPERPARAMETERS,
    create_run_folder,
    find_run,
    find_runs,
    flatten,
    locked,
    read_settings,
    read_summary,
)
from app.training.distributed import World
from app.training.failures import not_finite
from app.training.step import Schedule, TrainStep

# Fields of Run in last.pt.
COUNTERS = ("step", "epoch", "best", "images", "seconds")
# Remedies for damaged and missing checkpoints of a run to resume.
START_OVER = f"move {LAST} and {BEST} out of this folder to start over"
COPY_LAST = f"restore it, or copy {LAST} to {BEST} to go on with the network of {LAST}"
# Settings that a resumed run may change.
CHANGEABLE = (*NON_HYPERPARAMETERS, "trainer.compile")


@dataclass
class Run:
    """A training run."""

    cfg: TrainConfig
    world: World
    data: Dataset  # the data set, on `device`
    train_step: TrainStep  # the network, its optimiser and its EMA
    device: torch.device
    folder: Path
    step: int = 0  # completed steps
    epoch: int = 0  # completed epochs, validation included
    best: float = -1.0  # validation accuracy of best.pt; -1 without one
    images: int = 0  # images trained on by all processes
    seconds: float = 0.0  # time in training steps, without evaluation and checkpoints
    # TrainStep.statistics of the completed steps of this epoch, reduced over all processes
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0, 3))

    @property
    def schedule(self) -> Schedule:
        """Batch size, numbers of steps and epochs, and learning rates."""
        return self.train_step.schedule


def start(
    cfg: TrainConfig,
    world: World,
    resources: ExitStack,
    typed: Mapping[str, str],
    new_folder: Path | None,
) -> Run | dict[str, Any]:
    """Start or resume a run; if the run to resume is finished, return its summary.

    `resources` receives the lock of the run folder and the training step. After an error it first
    aborts the collective operations, for which the step may wait. The folder of a new run is
    created after all checks, which raise a UserError.
    """
    found = world.from_rank_0(lambda: find_state(cfg, world, resources, typed))
    if isinstance(found, dict):
        return found
    cfg, folder, saved = found
    if cfg.trainer.batch_size % world.size:
        raise UserError(
            f"trainer.batch_size={cfg.trainer.batch_size}: must be a multiple of {world.size}, "
            "the number of processes"
        )
    device = pick_device(cfg.device)
    if device.type == "cuda" and world.size > 1:
        torch.cuda.set_device(device)
    data = world.from_rank_0(lambda: load_dataset(data_of(cfg, saved))).to(device)
    if saved:
        data.fallback_from = saved.data.fallback_from
    if len(data.train) < world.size:
        raise UserError(
            f"data.val_size={len(data.val)}: leaves {len(data.train)} training images, "
            f"at least {world.size} are needed, one a process"
        )
    torch.backends.cudnn.deterministic = True  # bitwise reproducible
    torch.manual_seed(cfg.seed)
    model = build_model(cfg.model, len(data.classes)).to(device)
    if device.type == "cpu":
        model.to(memory_format=cpu_format(cfg.model))
    if cfg.trainer.precision == "fp64":
        model.double()
    train_step = resources.enter_context(closing(TrainStep(model, data, cfg, device, world)))
    resources.push(lambda error, *_: world.abort() if error else None)  # before it is closed
    choose_threads(device, saved.training.get("threads", 0) if saved else 0)
    run = Run(cfg, world, data, train_step, device, folder or Path())
    if saved:
        restore(run, saved)
    if not folder:
        run.folder = world.from_rank_0(lambda: create_run_folder(cfg, world.launch, new_folder))
        if world.rank == 0:
            resources.enter_context(locked(run.folder))
    return run


def find_state(
    cfg: TrainConfig, world: World, resources: ExitStack, typed: Mapping[str, str]
) -> tuple[TrainConfig, Path | None, Checkpoint | None] | dict[str, Any]:
    """Find and lock the run to resume: the one that torchrun restarts, or `cfg.resume`.

    Return its configuration, folder (None: a new run) and last checkpoint (None: start at step 0);
    for a finished run, its summary.
    """
    folder = None
    if world.restarts and world.launch:
        folder = find_launched(world.launch, cfg.outputs)
    if folder is None and cfg.resume is not None:
        folder = find_run(cfg.resume, cfg.outputs)
    if folder is None:
        return cfg, None, None
    remedy = "; a resumed run writes to its own folder, so make it writable or copy it"
    check_writable(folder, f"resume={folder}", remedy)
    resources.enter_context(locked(folder))
    summary = read_summary(folder)
    finished = summary["status"] == "finished"
    saved = None if finished else load_to_resume(folder / LAST)
    cfg = load_config(folder, cfg, saved, typed)
    if finished:
        print(f"{folder} is finished: test accuracy {summary['test_accuracy']:.2%}")
        return summary
    accuracy = saved.training.get("best") if saved else None
    if saved and not (isinstance(accuracy, float) and accuracy >= 0):  # before the first validation
        return cfg, folder, saved
    best = load_to_resume(folder / BEST, remedy=COPY_LAST if saved else START_OVER)
    if saved:
        if best is None:
            raise UserError(f"resume={folder}: its {BEST} is gone; {COPY_LAST}")
        # of this very file, which may have been restored or copied
        saved.training["best"] = best.metrics.get("val_accuracy", -1.0)
    elif best and (best.metrics["epoch"] or 0) > 1:
        raise UserError(f"resume={folder}: its {LAST} is gone; its best network is in {BEST}")
    return cfg, folder, saved


def load_to_resume(path: Path, remedy: str = START_OVER) -> Checkpoint | None:
    """Load a checkpoint of a run to resume; None if it is missing."""
    try:
        return load_checkpoint(path, "resume") if path.is_file() else None
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error


def find_launched(launch: str, outputs: str) -> Path | None:
    """Return the run folder that this torchrun launch created before a restart, if any."""
    for run in reversed(find_runs(Path(outputs))):
        if (run / LAUNCH).is_file() and (run / LAUNCH).read_text() == launch:
            return run
    return None


def load_config(
    folder: Path, asked: TrainConfig, saved: Checkpoint | None, typed: Mapping[str, str]
) -> TrainConfig:
    """Load the configuration of the run in `folder`, updated by the typed overrides in `asked`.

    Keep the run's `data.root`; if another is typed or the folder is gone, take that of `asked`.
    Raise a UserError for an override that changes a setting outside of `CHANGEABLE`.
    """
    values = read_settings(folder)
    try:
        cfg: TrainConfig = from_mapping(TrainConfig, values)
    except UserError as error:
        raise UserError(f"resume={folder}: {CONFIG}: cannot be read: {error}") from error
    own = flatten(cfg)
    # after a fallback, `data` may name the requested data set or the fallback
    used = flatten(dataclasses.replace(cfg, data=data_of(cfg, saved)))
    names_first = sorted(flatten(asked).items(), key=lambda item: not item[0].endswith(".name"))
    for key, value in names_first:
        group, _, name = key.partition(".")
        option = typed.get(key) or typed.get(group)  # data=mnist sets data.name, too
        if option and key in CHANGEABLE:
            setattr(getattr(cfg, group) if name else cfg, name or group, value)
        elif option and value not in (own.get(key), used.get(key)):
            raise UserError(
                f"{option}: the run to resume has {key}={format_value(own.get(key))}; "
                "leave it out, or start a new run"
            )
    is_kept = "data.root" not in typed and Path(own["data.root"]).is_dir()
    cfg.data.root = own["data.root"] if is_kept else asked.data.root
    cfg.outputs, cfg.resume = asked.outputs, str(folder)
    return cfg


def data_of(cfg: TrainConfig, saved: Checkpoint | None) -> DataConfig:
    """Return the configuration of the data set that a run uses, which may be the fallback."""
    if saved is None or saved.data.fallback_from is None:
        return cfg.data
    return dataclasses.replace(cfg.data, name=saved.data.name, val_size=saved.data.val_size)


def save(run: Run, name: str, **metrics: float) -> None:
    """Write the checkpoint `name`; `last.pt` includes the state to resume from.

    Raise a RunError if a weight is non-finite.
    """
    weights = run.train_step.trained.state_dict()
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise not_finite(run, "the weights are not finite", run.step)
    training: dict[str, Any] = {}
    if name == LAST:
        training = {key: getattr(run, key) for key in COUNTERS}
        training["points"] = run.statistics
        training["threads"] = torch.get_num_threads()
        training["state"] = run.train_step.state_dict()
    save_checkpoint(
        run.folder / name,
        Checkpoint(
            model={key: value.cpu().float().contiguous() for key, value in weights.items()},
            model_config=run.cfg.model,
            data=describe_data(run),
            metrics={"epoch": run.epoch, "step": run.step, **metrics},
            config=dataclasses.asdict(run.cfg),
            training=training,
        ),
    )


def restore(run: Run, saved: Checkpoint) -> None:
    """Restore the run from `saved`; raise a UserError if it does not match the run."""
    path = f"resume={run.folder / LAST}"
    for key, value in dataclasses.asdict(describe_data(run)).items():
        if (own := getattr(saved.data, key)) != value:
            raise UserError(f"{path}: is of data.{key}={own}, here it is {value}")
    if "logs" in saved.training:
        raise UserError(f"{path}: written by an older version, which cannot be resumed")
    try:
        run.train_step.load_state_dict(saved.training["state"])
        for key in COUNTERS:
            value, default = saved.training[key], getattr(run, key)
            if type(value) is not type(default):
                raise TypeError(f"{key} must be of type {type(default).__name__}")
            setattr(run, key, value)
        run.statistics = saved.training["points"]
        steps, columns = run.statistics.shape
        done = run.epoch * run.schedule.epoch_steps + steps
        if (run.step, columns) != (done, run.train_step.statistics.shape[1]):
            raise ValueError("step, epoch and points disagree")
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: its contents do not fit: {one_line(error)}") from error


def describe_data(run: Run) -> TrainingData:
    """Return the description of the run's data set for checkpoints."""
    values: Any = {item.name: getattr(run.data, item.name) for item in fields(DataDescription)}
    seed = run.cfg.data.split_seed
    return from_mapping(TrainingData, values | {"val_size": len(run.data.val), "split_seed": seed})
