from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw


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
    def step(self, lr: float) -> None:
        """Move the parameters against their gradients, which must all be there, and drop those."""
        adamw(
            self.parameters,
            [parameter.grad for parameter in self.parameters],  # type: ignore[misc]
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
