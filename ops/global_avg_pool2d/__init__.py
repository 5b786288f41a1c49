"""Global average pooling: an image's mean, channel by channel."""

from typing import Any

import torch
from torch import Tensor, nn

from ops.core import library

_pool = torch.ops.lenet_ops.global_avg_pool2d.default
_pool_backward = torch.ops.lenet_ops.global_avg_pool2d_backward.default


def global_avg_pool2d(input: Tensor) -> Tensor:
    """Averages every channel over the whole image: ``F.adaptive_avg_pool2d(input, 1)``.

    out[n, c, 0, 0] = Σ x[n, c, i, j] / (H W), summed in at least float32. The gradient of every
    x[n, c, i, j] is that of out[n, c, 0, 0], divided by H W.
    Lin, Chen & Yan, Network In Network, arXiv 1312.4400, section 3.2.

    Args:
        input: [N, C, H, W] or [C, H, W] of any height and width and any strides; float64, float32,
            bfloat16 or float16.

    Returns:
        [N, C, 1, 1] (or [C, 1, 1]) in the dtype and memory format of `input`; NaN where an image
        has no pixels, as the mean of nothing is.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: another dtype.
        RuntimeError: another number of dimensions.
    """
    op = "global_avg_pool2d"
    library.check_tensor(op, "input", input)
    if input.dim() not in (3, 4):
        raise RuntimeError(
            f"{op}: input must have shape [N, C, H, W] or [C, H, W], got {list(input.shape)}"
        )
    return _pool(input) if input.dim() == 4 else _pool(input.unsqueeze(0)).squeeze(0)


torch.fx.wrap("global_avg_pool2d")  # one node where a network is traced


class GlobalAvgPool2d(nn.Module):
    """Applies :func:`global_avg_pool2d`: [N, C, H, W] in, [N, C, 1, 1] out."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns global_avg_pool2d(input)."""
        return global_avg_pool2d(input)


@library.register_fake(_pool)
def _(input: Tensor) -> Tensor:
    return library.image_like(input, 1, 1)


@library.register_fake(_pool_backward)
def _(grad_output: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    shape = (*grad_output.shape[:2], 1, 1)
    library.check_fake(
        "global_avg_pool2d_backward", "grad_output", grad_output, shape, "grad_output", grad_output
    )
    return torch.empty(
        (*grad_output.shape[:2], height, width),
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    (input,) = inputs
    channels_last = library.suggest_memory_format(input) == torch.channels_last
    ctx.image = (*input.shape[2:], channels_last)  # all that backward needs: nothing is saved


def _backward(ctx: Any, saved: tuple[()], grad_output: Tensor) -> Tensor:
    return _pool_backward(grad_output, *ctx.image)


def _jvp(inputs: tuple[Tensor], outputs: Any, tangents: tuple[Tensor]) -> Tensor:
    return _pool(*tangents)


# The backward operator is linear, so its own derivatives need nothing of its inputs.


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _double_backward(ctx: Any, saved: tuple[()], grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _pool(grad), None, None, None


def _jvp_backward(inputs: tuple[Any, ...], outputs: Any, tangents: tuple[Any, ...]) -> Tensor:
    return _pool_backward(tangents[0], *inputs[1:])


def _vmap(info: Any, in_dims: tuple[int], input: Tensor) -> tuple[Tensor, int]:
    images = input.movedim(in_dims[0], 0)
    return _pool(images.flatten(0, 1)).unflatten(0, images.shape[:2]), 0


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, ...], grad_output: Tensor, *image: int
) -> tuple[Tensor, int]:
    (grad_output,) = library.batch_first(info, in_dims[:1], grad_output)
    grad_input = _pool_backward(grad_output.flatten(0, 1), *image)
    return grad_input.unflatten(0, grad_output.shape[:2]), 0


library.register_autograd(_pool, _setup, _backward, _jvp, _vmap)
library.register_autograd(
    _pool_backward, _setup_backward, _double_backward, _jvp_backward, _vmap_backward
)
