"""What elementwise operators share: fakes, gradients and vmap follow from partial derivatives."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ops.core import library


def register(
    op: torch._ops.OpOverload,
    partials: Sequence[Callable[..., Tensor]],
    saves: Literal["inputs", "output"] = "inputs",
) -> None:
    """Registers what PyTorch must know of an operator whose tensors have one shape.

    An element of the output depends on the inputs' elements at its place alone. So its gradient
    and its directional derivative are products with the same numbers.

    Args:
        op: the operator.
        partials: for each input f(x, *saved), x times the partial derivative.
        saves: the tensors that these take.
    """
    names = [argument.name for argument in op._schema.arguments]

    def fake(*tensors: Tensor) -> Tensor:
        like = tensors[-1]
        for name, x in zip(names, tensors, strict=True):
            library.check_fake(op._opname, name, x, like.shape, names[-1], like)
        return torch.empty_like(like)

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(inputs if saves == "inputs" else (output,)))

    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor
    ) -> tuple[Tensor | None, ...] | Tensor:
        if len(partials) == 1:  # the usual way is a short one
            return partials[0](grad_output, *saved)
        return tuple(
            partial(grad_output, *saved) if needed else None
            for partial, needed in zip(partials, ctx.needs_input_grad, strict=True)
        )

    def jvp(
        inputs: tuple[Tensor, ...], outputs: tuple[Tensor], tangents: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        saved = inputs if saves == "inputs" else outputs
        return library.total(
            *(
                partial(x, *saved)
                for partial, x in zip(partials, tangents, strict=True)
                if x is not None
            )
        )

    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        return op(*library.batch_first(info, in_dims, *tensors)), 0

    library.register_fake(op)(fake)
    library.register_autograd(op, setup, backward, jvp, vmap)
