"""Muon, AdamW, one-cycle learning rate, EMA weight."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from app.config.schema import OptimConfig


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters."""
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]


class AdamW:
    """`torch.optim.AdamW(parameters, fused=True)` without importing torch's compiler (2 s)."""

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float) -> None:
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = [torch.zeros((), device=parameter.device) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Update the parameters, then set their gradients to None."""
        adamw(
            self.parameters,
            gradients(self.parameters),
            self.means,
            self.squares,
            [],
            self.steps,
            fused=True,
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

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the state by name, without copying its tensors."""
        return {"means": self.means, "squares": self.squares, "steps": self.steps}


class Muon:
    """Muon (Jordan et al., 2024) for weights, AdamW for parameters of one dimension.

    A weight W is a matrix with a row per output. With its gradient G and β = `momentum`,
    M ← β M + (1 − β) G, U = β M + (1 − β) G, and
    W ← W (1 − lr · weight_decay) − lr · √max(1, rows / columns) · orthogonalize(U).
    """

    def __init__(
        self, parameters: Iterable[Tensor], weight_decay: float, momentum: float = 0.9
    ) -> None:
        self.parameters = list(parameters)
        self.weight_decay, self.momentum = weight_decay, momentum
        weights = [parameter for parameter in self.parameters if parameter.ndim > 1]
        # a GPU takes as long for one matrix as for all of them
        together = bool(weights) and weights[0].device.type == "cuda"
        self.stacks = [Stack(weights)] if together else [Stack([weight]) for weight in weights]
        self.others = AdamW(
            [parameter for parameter in self.parameters if parameter.ndim < 2], weight_decay
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """See `AdamW.step`."""
        self.others.step(lr)
        for stack in self.stacks:
            gradient = stack.gradients()
            stack.momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp_(stack.momentum, self.momentum).squeeze(0))
            update = update * (stack.scale * lr)
            torch._foreach_mul_(stack.weights, 1 - lr * self.weight_decay)
            torch._foreach_sub_(stack.weights, stack.parts(update))
            for weight in stack.weights:
                weight.grad = None

    def state_dict(self) -> dict[str, list[Tensor]]:
        """See `AdamW.state_dict`."""
        momenta = [part for stack in self.stacks for part in stack.parts(stack.momentum)]
        return {"momenta": momenta, **self.others.state_dict()}


class Stack:
    """Weights stacked as matrices [n, rows, columns] with rows ≤ columns, padded with zeros.

    `scale` is √max(1, rows / columns) of each weight, [n, 1, 1].
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        shapes = [weight.flatten(1).shape for weight in weights]
        rows, columns = (max(side) for side in zip(*map(sorted, shapes), strict=True))
        self.momentum = weights[0].new_zeros(len(shapes), rows, columns)
        scales = [max(1.0, shape[0] / shape[1]) ** 0.5 for shape in shapes]
        self.scale = self.momentum.new_tensor(scales).view(-1, 1, 1)

    def parts(self, stacked: Tensor) -> list[Tensor]:
        """Split a tensor like `momentum` into views with the shapes of the weights."""
        parts = []
        for matrix, weight in zip(stacked, self.weights, strict=True):
            rows, columns = weight.flatten(1).shape
            part = matrix[:rows, :columns] if rows <= columns else matrix[:columns, :rows].T
            parts.append(part.view(weight.shape))
        return parts

    def gradients(self) -> Tensor:
        """Stack the gradients of the weights, [n, rows, columns]."""
        stacked = torch.zeros_like(self.momentum)
        torch._foreach_copy_(self.parts(stacked), gradients(self.weights))
        return stacked


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of [..., rows, columns] into (0.6, 1.3), except those near 0.

    Five Newton-Schulz steps X ← (a + b X Xᵀ + c (X Xᵀ)²) X with a, b, c = 3.4445, −4.7750, 2.0315
    (Jordan et al., 2024). Each step updates the Gram matrix X Xᵀ, whose side is the shorter one of
    X, so that only the first and the last product involve X.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    matrices = matrices / (norms + 1e-7)
    gram = matrices @ matrices.mT
    factor = product = _newton_schulz(gram)
    for _ in range(4):
        gram = factor @ gram @ factor
        factor = _newton_schulz(gram)
        product = factor @ product
    return product @ matrices


def _newton_schulz(gram: Tensor) -> Tensor:
    add_product = torch.addmm if gram.ndim == 2 else torch.baddbmm
    factor = add_product(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    factor.diagonal(dim1=-2, dim2=-1).add_(3.4445)
    return factor


OPTIMIZERS: dict[str, type[AdamW | Muon]] = {"adamw": AdamW, "muon": Muon}


@torch.no_grad()
def copy_into(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy `values` into `tensors`, which keep their device and memory format."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def one_cycle(step: int, steps: int, cfg: OptimConfig) -> float:
    """Return the learning rate of a step: cosine from `cfg.lr` / 25 to `cfg.lr`, then down to 0.

    One-cycle schedule of Smith and Topin (arXiv 1708.07120).
    """
    rise = cfg.warmup * steps
    if step < rise:
        low, share = cfg.lr / 25, step / rise
    else:
        low, share = 0.0, (steps - step) / (steps - rise)
    return low + (cfg.lr - low) * (1 - math.cos(math.pi * share)) / 2


def ema_weight(step: int, decay: float) -> float:
    """Return the EMA weight of the parameters after a step: max(1 - decay, 1 / (step + 1))."""
    return max(1 - decay, 1 / (step + 1))
