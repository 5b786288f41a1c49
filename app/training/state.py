"""A training run: what it works with, how far it has come, and its way to the disk and back."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.config.device import pick_device
from app.config.errors import RunError, UserError
from app.config.overrides import typed_keys
from app.config.schema import AugmentConfig, ModelConfig, TrainConfig, from_mapping, shown
from app.data.datasets import Dataset, load_dataset
from app.models import build_model, cpu_format
from app.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from app.runs.folder import (
    CONFIG,
    FREE,
    LAUNCH,
    create_run_folder,
    find_run,
    find_runs,
    flatten,
    newest,
    read_settings,
    read_summary,
)
from app.training.distributed import World
from app.training.learner import Learner
from app.training.optimizers import one_cycle

LAST, BEST = "last.pt", "best.pt"
COUNTERS = ("step", "epoch", "best", "images", "seconds")  # of Run, in checkpoints


@dataclass
class Run:
    """A training run.

    Attributes:
        data: On `device`.
        step: Steps done.
        epoch: Epochs done, each with its validation.
        best: Validation accuracy of best.pt; -1 before there is one.
        images: Images trained on by all processes.
        seconds: Spent in training steps, without evaluation and checkpoints.
        points: What the noted steps of this epoch returned, over all processes: loss, number
            correct, norm of the gradient.
        logs: Sizes of the files of curves when the run was last saved.
    """

    cfg: TrainConfig
    world: World
    data: Dataset
    learner: Learner
    device: torch.device
    folder: Path
    step: int = 0
    epoch: int = 0
    best: float = -1.0
    images: int = 0
    seconds: float = 0.0
    points: list[list[float]] = field(default_factory=list)
    logs: dict[str, int] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Images in a batch of all processes: a data set can be smaller than what was asked for."""
        size = self.world.size
        return min(self.cfg.trainer.batch_size, len(self.data.train) // size * size)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch; what is left after its last full batch is skipped."""
        return len(self.data.train) // self.batch_size

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self.cfg.trainer.epochs or max(2, math.ceil(12_000 / len(self.data.train)))

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.epoch_steps

    @property
    def augment(self) -> AugmentConfig | None:
        """How training images are distorted; None: not at all."""
        cfg = self.cfg.augment
        return cfg if self.cfg.data.augment and any(dataclasses.astuple(cfg)) else None

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return one_cycle(step, self.steps, self.cfg.optim)


def start(cfg: TrainConfig, world: World | None = None) -> Run:
    """Everything up to the first step, of a new run or of one that is resumed.

    The run folder comes last, when nothing can be wrong any more.

    Raises:
        UserError: The data, the device, the output folder or the run to resume cannot be used.
    """
    world = world or World()
    folder, saved = None, None
    if world.rank == 0:
        folder = _find(cfg, world)
        cfg = load_config(folder, cfg) if folder else cfg
        if folder and (folder / LAST).is_file():
            saved = load_checkpoint(folder / LAST, "resume")
        elif folder:
            refuse_to_lose(folder)
    cfg, folder, saved = world.broadcast((cfg, folder, saved))
    if cfg.trainer.batch_size % world.size:
        raise UserError(
            f"trainer.batch_size={cfg.trainer.batch_size}: must be a multiple of {world.size}, "
            "the number of processes"
        )
    device = pick_device(cfg.device)
    data = load_dataset(cfg.data)
    torch.backends.cudnn.deterministic = True  # the same bits in every run
    torch.manual_seed(cfg.seed)
    model = build_model(cfg.model, len(data.classes)).to(device)
    if device.type == "cpu":
        model.to(memory_format=cpu_format(cfg.model))
    if cfg.trainer.precision == "fp64":
        model.double()
    parts = {part: getattr(data, part).to(device) for part in ("train", "val", "test")}
    data = dataclasses.replace(data, **parts)
    learner = Learner(model, cfg, device, world)
    run = Run(cfg, world, data, learner, device, folder or Path())
    if saved:
        restore(run, saved)
    if world.rank == 0 and not folder:
        run.folder = create_run_folder(cfg, world.launch)
    run.folder = world.broadcast(run.folder)
    return run


def refuse_to_lose(folder: Path) -> None:
    """Raise a UserError if a run without `last.pt` had come further than its first epoch.

    Until then it begins anew: it may have been killed before there was one.
    """
    if read_summary(folder).get("status") == "finished" or not (folder / BEST).is_file():
        return
    if load_checkpoint(folder / BEST, "resume").metrics["epoch"] > 1:
        raise UserError(
            f"resume={folder}: its {LAST} is gone, from which it would go on; "
            f"its best network is in {BEST}"
        )


def save(run: Run, name: str, **metrics: float) -> None:
    """Write the run's state to the checkpoint `name` in its folder; `last.pt` can be resumed from.

    Raises:
        RunError: The weights are not finite numbers, or the file cannot be written.
    """
    weights = run.learner.trained.state_dict()
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise not_finite(run, "the weights are not finite", run.step)
    counters = {name: getattr(run, name) for name in COUNTERS}
    training = counters | {
        "points": torch.tensor(run.points, dtype=torch.float32).view(-1, 3),
        "logs": run.logs,
        "learner": run.learner.state_dict(),
    }
    save_checkpoint(
        run.folder / name,
        Checkpoint(
            model={key: value.cpu().float().contiguous() for key, value in weights.items()},
            model_config=dataclasses.asdict(run.cfg.model),
            data=describe_data(run),
            metrics={"epoch": run.epoch, "step": run.step, **metrics},
            config=dataclasses.asdict(run.cfg),
            training=training if name == LAST else {},
        ),
    )


def restore(run: Run, saved: Checkpoint) -> None:
    """Bring `run` to where it was when `saved` was written.

    Raises:
        UserError: It is of another network or data set, or not to be resumed from.
    """
    path = f"resume={run.folder / LAST}"
    if not saved.training:
        raise UserError(f"{path}: holds a network, but not the state of its training")
    kind = dataclasses.asdict(from_mapping(ModelConfig, saved.model_config))  # old ones lack keys
    for part, own, here in (
        ("model", kind, dataclasses.asdict(run.cfg.model)),
        ("data", saved.data, describe_data(run)),
    ):
        for key, value in here.items():
            if own.get(key) != value:
                raise UserError(f"{path}: is of {part}.{key}={own.get(key)}, here it is {value}")
    try:
        run.learner.load_state_dict(saved.training["learner"])
        for name in COUNTERS:
            setattr(run, name, saved.training[name])
        run.points, run.logs = saved.training["points"].tolist(), saved.training["logs"]
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: its contents do not fit: {reason}") from error


def describe_data(run: Run) -> dict[str, Any]:
    """What the run is trained on, as checkpoints have it."""
    data = run.data
    return {
        "name": data.name,
        "classes": list(data.classes),
        "mean": data.mean,
        "std": data.std,
        "fallback_from": data.fallback_from,
        "val_size": len(data.val),
        "split_seed": run.cfg.data.split_seed,
    }


def not_finite(run: Run, what: str, step: int) -> RunError:
    """The error for a run that has left the numbers, after `step` steps."""
    return RunError(
        f"{what} at step {step}, where the learning rate was {run.rate(step - 1):.2g}: "
        f"try a smaller optim.lr ({last_good(run)})"
    )


def last_good(run: Run) -> str:
    """What a run that has failed can be resumed from, in words."""
    last = run.folder / LAST
    return f"last good checkpoint: {last}" if last.is_file() else "there is no checkpoint yet"


def finished(run: Run) -> dict[str, Any] | None:
    """The summary of a run that is at its end, None for any other.

    Raises:
        UserError: It cannot be read.
    """
    summary = read_summary(run.folder)
    return summary if summary.get("status") == "finished" else None


def _find(cfg: TrainConfig, world: World) -> Path | None:
    """The folder of the run to go on with: where torchrun's last start came to, or as asked."""
    if world.restarts and world.launch and (folder := find_launched(world.launch, cfg.outputs)):
        return folder
    return find_run(cfg.resume, cfg.outputs) if cfg.resume is not None else None


def find_launched(launch: str, outputs: str) -> Path | None:
    """The run folder that an earlier start of the same launch has made, if it came so far."""
    launched = [run for run in find_runs(Path(outputs)) if (run / LAUNCH).is_file()]
    return newest(run for run in launched if (run / LAUNCH).read_text() == launch)


def load_config(folder: Path, asked: TrainConfig) -> TrainConfig:
    """The configuration of the run in `folder`, with the places that `asked` names.

    Raises:
        UserError: It cannot be read, or `asked` is for another kind of run; names the first key.
    """
    values = read_settings(folder)
    try:
        cfg = from_mapping(TrainConfig, values)
    except (UserError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"resume={folder}: {CONFIG}: cannot be read: {error}; name another run's folder"
        ) from error
    own, new, default = flatten(cfg), flatten(asked), flatten(TrainConfig())
    typed = typed_keys()
    for key, value in new.items():
        option = typed.get(key.partition(".")[0])  # of a group: data=mnist sets data.name, too
        wanted = value != default[key] or key in typed or option
        if key not in FREE and wanted and value != own[key]:
            sets = f"{option}: sets " if option and key not in typed and "." in key else ""
            raise UserError(
                f"{sets}{key}={shown(value)}: the run to resume has {shown(own[key])}; "
                "leave it out, or start a new run"
            )
    cfg.data.root, cfg.outputs, cfg.resume = asked.data.root, asked.outputs, str(folder)
    cfg.device = cfg.device if asked.device == TrainConfig().device else asked.device
    return cfg
