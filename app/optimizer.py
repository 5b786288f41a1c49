import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from app.config import OptimConfig


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    The numbers are those of `torch.optim.AdamW(parameters, fused=True)`, by torch's own function.
    The learning rate is an argument of the step, the state is plain tensors, and starting it does
    not import torch's compiler, which takes that class two seconds.

    Args:
        parameters: What is trained, on one device.
        weight_decay: Share of a weight that is taken from it in a step, in units of the learning
            rate.
    """

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = [torch.zeros((), device=parameter.device) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, lr: float | Tensor, overflow: Tensor | None = None) -> None:
        """Move the parameters against their gradients, which must all be there, and drop those.

        Args:
            lr: The learning rate.
            overflow: float32 []; where it is 1 on the device, nothing is moved.
        """
        adamw(
            self.parameters,
            self.gradients(),
            self.means,
            self.squares,
            [],
            self.steps,
            fused=True,
            found_inf=overflow,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The parameters' gradients, in their order."""
        return [parameter.grad for parameter in self.parameters]  # type: ignore[misc]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The state, by name; the tensors are the optimiser's own."""
        return {"means": self.means, "squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over the values of a `state_dict` of an optimiser of the same parameters."""
        for name, tensors in self.state_dict().items():
            copy_into(tensors, state[name])


class LossScale:
    """The factor that keeps float16 gradients from vanishing, halved where they overflow.

    By torch's own functions, the ones of `torch.amp.GradScaler`; all of it stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), 2.0**16, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.overflow = torch.zeros((), device=device)

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor]) -> Tensor:
        """Divide the gradients by the scale: float32 [], 1 where one was not finite, else 0."""
        self.overflow.zero_()
        inverse = self.scale.reciprocal()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.overflow, inverse)
        torch._amp_update_scale_(self.scale, self.growth, self.overflow, 2.0, 0.5, 2000)
        return self.overflow

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The state; the tensors are the scale's own."""
        return {"scale": [self.scale, self.growth]}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over the values of a `state_dict`."""
        copy_into(self.state_dict()["scale"], state["scale"])


@torch.no_grad()
def copy_into(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy each of `values` into the tensor at its place, which keeps its device and layout."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def one_cycle(step: int, steps: int, cfg: OptimConfig) -> float:
    """Learning rate of a step: cosine up to `cfg.lr` for `cfg.warmup` of the steps, then down to 0.

    After Smith and Topin (arXiv 1708.07120), with cosine flanks, from 1/25 of the top.
    """
    rise = cfg.warmup * steps
    if step < rise:
        low, share = cfg.lr / 25, step / rise
    else:
        low, share = 0.0, (steps - step) / (steps - rise)
    return low + (cfg.lr - low) * (1 - math.cos(math.pi * share)) / 2


def plain(state: Any) -> Any:
    """A copy of nested dictionaries and lists with their tensors on the CPU, contiguous."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state
