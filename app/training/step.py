"""The training step, captured as a CUDA graph, and the schedule of the steps."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

from app.config.schema import TrainConfig
from app.data.datasets import Dataset
from app.data.sampler import Plan, plan_epoch
from app.data.transforms import normalize, warp
from app.training.distributed import World
from app.training.optimizers import (
    OPTIMIZERS,
    copy_into,
    ema_weight,
    gradients,
    one_cycle,
)

LOSS, NORM = 0, 2  # columns of TrainStep.statistics
WARM_UP = 3  # steps before a capture; cuBLAS and cuDNN load kernels in the first ones


class Schedule:
    """Batch size, number of steps and learning rates; images after the last full batch are skipped.

    `batch_size` is that of all processes together; `augment` is None without distortions.
    """

    def __init__(self, cfg: TrainConfig, images: int, processes: int) -> None:
        self.cfg = cfg
        self.batch_size = min(cfg.trainer.batch_size, images // processes * processes)
        self.epoch_steps = images // self.batch_size
        self.epochs = cfg.trainer.epochs or max(2, math.ceil(12_000 / images))
        self.steps = self.epochs * self.epoch_steps
        distorts = cfg.data.augment and any(dataclasses.astuple(cfg.augment))
        self.augment = cfg.augment if distorts else None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return one_cycle(step, self.steps, self.cfg.optim)


class TrainStep:
    """A training step: distort, normalise, forward, loss, backward, optimiser, EMA.

    Batches, distortions, learning rates and the index of the step that selects them are on the
    device. So on CUDA the step is replayed as a graph: one launch instead of some two hundred,
    which take ten times as long as the kernels. The processes of `world` share each batch.

    `statistics` are the loss, number of correct images before the step, and gradient norm of each
    step of the epoch, float32 [steps, 3], on the device.
    """

    def __init__(
        self, model: nn.Module, data: Dataset, cfg: TrainConfig, device: torch.device, world: World
    ) -> None:
        self.model, self.data, self.cfg, self.device, self.world = model, data, cfg, device, world
        self.schedule = Schedule(cfg, len(data.train), world.size)
        self.optimizer = OPTIMIZERS[cfg.optim.name](model.parameters(), cfg.optim.weight_decay)
        world.replicate(self.optimizer.parameters)
        self.average = copy.deepcopy(model).requires_grad_(False) if cfg.optim.ema else None
        captured = device.type == "cuda" and cfg.trainer.compile is not False
        self._stream = torch.cuda.Stream(device) if captured else None
        self._forward: Callable[[Tensor], Tensor] = model
        if cfg.trainer.compile is True:  # auto: no, it takes longer than all the steps of a run
            # Reductions tuned by timing would change the bits from run to run. The few kernels
            # compile before a pool of compiler processes has started.
            options: dict[str, Any] = {"deterministic": True, "compile_threads": 1}
            self._forward = torch.compile(model, options=options)
        self.statistics = torch.zeros(self.schedule.epoch_steps, 3, device=device)
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._rates = torch.zeros(self.schedule.epoch_steps, 2, device=device)
        self._plan: Plan | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def trained(self) -> nn.Module:
        """The network to use: with the averaged weights if there are any."""
        return self.model if self.average is None else self.average

    def begin(self, epoch: int, index: int) -> None:
        """Prepare the batches and rates of an epoch, of which `index` steps have been taken."""
        count, augment = len(self.data.train), self.schedule.augment
        share = self.world.rank, self.world.size
        batch_size = self.schedule.batch_size
        plan = plan_epoch(self.cfg.seed, epoch, count, batch_size, augment, share)
        first = epoch * self.schedule.epoch_steps
        rates = [
            (self.schedule.rate(step), ema_weight(step, self.cfg.optim.ema))
            for step in range(first, first + self.schedule.epoch_steps)
        ]
        self._rates.copy_(torch.tensor(rates))
        self._index.fill_(index)
        if self._plan is not None:
            old, new = ([part for part in it if part is not None] for it in (self._plan, plan))
            copy_into(old, new)
            return
        self._plan = tree_map_only(Tensor, lambda part: part.to(self.device), plan)
        if self._stream is not None:
            with torch.cuda.device(self.device):
                self._capture(self._stream)

    def take(self) -> None:
        """Take the next step."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        """Train on one batch; nothing here waits for the device."""
        plan, train = cast(Plan, self._plan), self.data.train
        batch = plan.batches.index_select(0, self._index)[0]
        images, labels = train.images[batch], train.labels[batch]
        if plan.maps is not None:
            images = warp(images.float(), plan.maps.index_select(0, self._index)[0])
        inputs = normalize(images, self.data.mean, self.data.std)
        lr, ema = self._rates.index_select(0, self._index)[0]

        smoothing = self.cfg.optim.label_smoothing
        autocast = self.cfg.trainer.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            logits = self._forward(inputs.to(self.optimizer.parameters[0].dtype))
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        parameters = self.optimizer.parameters
        loss.backward()
        self.world.average(gradients(parameters))

        with torch.no_grad():
            norms = torch._foreach_norm(gradients(parameters))
            norm = torch.linalg.vector_norm(torch.stack(norms))
            correct = (logits.argmax(1) == labels).sum()
            self.optimizer.step(lr)
            if self.average is not None:
                averages: list[Tensor] = list(self.average.parameters())
                moves = list(torch._foreach_sub(parameters, averages))
                torch._foreach_mul_(moves, ema)
                torch._foreach_add_(averages, moves)
                copy_into(list(self.average.buffers()), list(self.model.buffers()))
            result = torch.stack([loss.detach(), correct, norm]).float()
            self.statistics.index_copy_(0, self._index, result[None])
            self._index += 1

    def close(self) -> None:
        """Release the CUDA graph before the process group is closed: NCCL waits for its graphs."""
        if self._graph is not None:
            self._graph.reset()  # dropping it is not enough: tracebacks may refer to it
        self._graph, self._forward = None, self.model

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Capture a step as a CUDA graph, and restore the state from before."""
        state = [*tree_leaves(self._state()), self._index]
        before = [tensor.clone() for tensor in state]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
                copy_into(state, before)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()  # before the capture, for `close` if it fails
        # thread_local: the threads of NCCL may query the device meanwhile
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._step()

    def state_dict(self) -> dict[str, Any]:
        """Copy the state that the next step depends on to the CPU."""
        kwargs = {"copy": True, "memory_format": torch.contiguous_format}
        return tree_map_only(Tensor, lambda it: it.detach().to("cpu", **kwargs), self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a `state_dict` in place: weights keep their memory format, as sums depend on it."""
        own = self._state()
        if tree_structure(own) != tree_structure(state):
            raise ValueError("the state of another network or optimiser")
        copy_into(tree_leaves(own), tree_leaves(state))

    def _state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}
