import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.config.schema import TrainConfig
from app.training.distributed import World
from app.training.optimizers import LossScale, copy_into, leaves, make_optimizer, plain

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A network and what changes it: optimiser, average of the weights, loss scale.

    Nothing in a step waits for the device or depends on the data in shape.

    Args:
        model: The network, on its device.
        cfg: The run's configuration.
        device: Where it is.
        world: The processes that share the work; gradients are averaged over them.

    Attributes:
        stream: Where a step is to be captured; None where it is not.
    """

    def __init__(
        self, model: nn.Module, cfg: TrainConfig, device: torch.device, world: World
    ) -> None:
        self.model = model
        self.device = device
        self.optim = cfg.optim
        self.dtype = AUTOCAST.get(cfg.trainer.precision)
        self.optimizer = make_optimizer(model.parameters(), cfg.optim)
        self.average = copy.deepcopy(model).requires_grad_(False) if cfg.optim.ema else None
        self.loss_scale = LossScale(device) if self.dtype == torch.float16 else None
        captured = device.type == "cuda" and cfg.trainer.compile is not False
        self.stream = torch.cuda.Stream(device) if captured else None
        with torch.cuda.stream(self.stream):  # where its gradients are to be averaged, too
            replica = world.replicate(model, device)
        # auto: no, compiling takes longer than all the steps of a run
        self._forward = torch.compile(replica) if cfg.trainer.compile is True else replica

    @property
    def trained(self) -> nn.Module:
        """The network to use: of the averaged weights if there are, else of the newest."""
        return self.model if self.average is None else self.average

    def step(
        self, images: Tensor, labels: Tensor, lr: float | Tensor, share: float | Tensor
    ) -> Tensor:
        """Take one step of the optimiser.

        Args:
            images: Normalised, float [B, 1, 28, 28].
            labels: int64 [B].
            lr: The learning rate.
            share: What the new weights take in their average, see `average_share`.

        Returns:
            The mean loss, the number of images right before the step and the norm of the gradient,
            float32 [3], on the device.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self._forward(images.to(self.optimizer.parameters[0].dtype))
            loss = F.cross_entropy(logits, labels, label_smoothing=self.optim.label_smoothing)
        overflow = None
        if self.loss_scale is None:
            loss.backward()
        else:
            (loss * self.loss_scale.scale).backward()
            overflow = self.loss_scale.unscale(self.optimizer.gradients())
        with torch.no_grad():
            norms = torch._foreach_norm(self.optimizer.gradients())
            norm = torch.linalg.vector_norm(torch.stack(norms))
            correct = (logits.argmax(1) == labels).sum()
            self.optimizer.step(lr, overflow)
            if self.average is not None:
                averages: list[Tensor] = list(self.average.parameters())
                moves = list(torch._foreach_sub(self.optimizer.parameters, averages))
                torch._foreach_mul_(moves, share)
                torch._foreach_add_(averages, moves)
                copy_into(list(self.average.buffers()), list(self.model.buffers()))
            return torch.stack([loss.detach(), correct, norm]).float()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, on the CPU."""
        cuda_rng = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
        return plain(self._state() | {"rng": [torch.get_rng_state()], "cuda_rng": cuda_rng})

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return leaves(self._state())

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`.

        Raises:
            KeyError, RuntimeError, ValueError: It is of another kind of learner.
        """
        _load(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            _load(self.average, state["average"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        torch.set_rng_state(state["rng"][0])
        if self.device.type == "cuda":  # a resumed run may see more or fewer devices
            for index, value in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value, index)


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy in place: the weights keep their memory format, which the order of sums depends on."""
    own = model.state_dict()
    copy_into(list(own.values()), [state[name] for name in own])
