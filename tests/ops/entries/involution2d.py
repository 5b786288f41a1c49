from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import Involution2d, involution2d
from tests.ops.operator_entry import Case, Operator, Wrong, pairs, raw

X, W = torch.ones(2, 4, 5, 4), torch.ones(2, 2, 3, 3, 3, 2)
LISTS = ([1, 1], [0, 0], [1, 1])  # stride, padding, dilation as torch.ops takes them


def reference(
    x: Tensor,
    weight: Tensor,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    (sh, sw), (ph, pw), (dh, dw) = pairs(stride, padding, dilation)
    _, groups, kh, kw, _, _ = weight.shape
    padded = F.pad(x, (pw, pw, ph, ph))
    windows = padded.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    windows = windows[..., ::dh, ::dw]  # [N, C, Ho, Wo, kH, kW]
    windows = windows.unflatten(1, (groups, x.shape[1] // groups))
    kernels = weight.permute(0, 1, 4, 5, 2, 3).unsqueeze(2)
    return (windows * kernels).sum((-2, -1)).flatten(1, 2)


def module_reference(module: Involution2d, x: Tensor) -> Tensor:
    """Compute the layer from its parts, in training mode."""
    reduced = F.conv2d(x, module.reduce.weight)
    normed = F.batch_norm(reduced, None, None, module.norm.weight, module.norm.bias, training=True)
    spanned = F.conv2d(normed.relu(), module.span.weight, module.span.bias)
    return involution2d(x, spanned.view(2, 3, 3, 3, 5, 4), padding=1)


OPERATOR = Operator(
    name="involution2d",
    function=involution2d,
    reference=reference,
    cases=(
        Case(((2, 6, 5, 4), (2, 3, 3, 3, 5, 4)), {"padding": 1}),
        Case(((2, 3, 5, 4), (2, 1, 2, 3, 2, 2)), {"stride": (2, 1)}),
        Case(((1, 2, 7, 8), (1, 2, 3, 2, 7, 11)), {"dilation": (2, 3), "padding": (2, 3)}),
        Case(((2, 2, 3, 3), (2, 1, 1, 1, 5, 5)), {"padding": 3, "stride": 2}),
        Case(((1, 18, 3, 19), (1, 2, 3, 3, 1, 19)), {"padding": (0, 1)}),
    ),
    resized=((3, 6, 7, 8), (3, 3, 3, 3, 7, 8)),
    empty=(
        Case(((0, 4, 5, 4), (0, 2, 3, 3, 3, 2))),
        Case(((2, 0, 5, 4), (2, 1, 3, 3, 3, 2))),
        Case(((2, 4, 0, 4), (2, 2, 3, 3, 2, 6)), {"padding": 2}),
    ),
    bulk=Case(((3, 24, 27, 31), (3, 2, 5, 5, 27, 31)), {"padding": 2}),
    huge=Case(((3, 66, 2**12, 2**12), (3, 1, 3, 3, 2**12, 2**12)), {"padding": 1}),
    autocast="region",
    module=partial(Involution2d, 6, 3, group_channels=2),
    state=1,
    module_reference=module_reference,
    wrong=(
        Wrong(lambda: involution2d(1, W), TypeError, "input … int"),
        Wrong(lambda: involution2d(X, None), TypeError, "weight … NoneType"),
        Wrong(
            lambda: involution2d(X.int(), W.int()), NotImplementedError, "int32 … input … float32"
        ),
        Wrong(
            lambda: involution2d(X, W.double()), RuntimeError, "weight … dtype … float32 … float64"
        ),
        Wrong(lambda: involution2d(X[0], W), RuntimeError, "input … [N, C, H, W] … [4, 5, 4]"),
        Wrong(
            lambda: involution2d(X, W[0]),
            RuntimeError,
            "weight … [N, G, kH, kW, Ho, Wo] … [2, 3, 3, 3, 2]",
        ),
        Wrong(
            lambda: involution2d(X, W[:1]),
            RuntimeError,
            "weight … N = 2 … C = 4 … [1, 2, 3, 3, 3, 2]",
        ),
        Wrong(
            lambda: involution2d(X, torch.ones(2, 3, 3, 3, 3, 2)),
            RuntimeError,
            "weight … G a divisor of C = 4 … [2, 3, 3, 3, 3, 2]",
        ),
        Wrong(
            lambda: involution2d(X, W, padding=1),
            RuntimeError,
            "weight … Ho = 5 … Wo = 4 … [2, 2, 3, 3, 3, 2]",
        ),
        Wrong(
            lambda: involution2d(X, torch.ones(2, 2, 6, 3, 3, 2)), RuntimeError, "kernel … 6 … 5"
        ),
        Wrong(lambda: involution2d(X, W, stride=0), RuntimeError, "stride … at least 1 … 0"),
        Wrong(
            lambda: involution2d(X, W, padding=(0, -1)),
            RuntimeError,
            "padding … at least 0 … (0, -1)",
        ),
        Wrong(lambda: involution2d(X, W, dilation=0), RuntimeError, "dilation … at least 1 … 0"),
        Wrong(lambda: involution2d(X, W, stride="2"), TypeError, "stride … pair … '2'"),
        Wrong(
            lambda: raw.involution2d(X[0], W, *LISTS),
            RuntimeError,
            "input … [N, C, H, W] … [4, 5, 4]",
        ),
        Wrong(lambda: raw.involution2d(X, W, [1, 1, 1], *LISTS[1:]), RuntimeError, "stride … two"),
        Wrong(
            lambda: raw.involution2d(X, W[:, :, :0], *LISTS),
            RuntimeError,
            "weight … [2, 2, 0, 3, 3, 2]",
        ),
        Wrong(
            lambda: raw.involution2d_backward(X, X, W, *LISTS, [True] * 2),
            RuntimeError,
            "grad_output … [2, 4, 3, 2] … [2, 4, 5, 4]",
        ),
        Wrong(
            lambda: raw.involution2d_backward(X[..., :3, :2], X, W, *LISTS, [True] * 3),
            RuntimeError,
            "output_mask … two",
        ),
    ),
)
