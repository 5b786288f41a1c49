"""Benchmark cases: operators, shapes, passes, PyTorch peers and the float64 reference."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import ops
from bench import recurrent

ELEMENTWISE = ("gelu", "exp", "ncrelu")
DEPTHWISE = ("depthwise", "depthwise1d")
CONVOLVED = (*DEPTHWISE, "involution")
OPS = (*ELEMENTWISE, "pool", "max_pool", "batch_norm", *CONVOLVED, *recurrent.NAMES)
WINDOWED = (*CONVOLVED, "max_pool")
COMPILED = "torch.compile"
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MANTISSA_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}  # with the implicit one

# Inputs that each pass differentiates: 0 image, 1 weight, 2 bias.
PASSES = {
    "forward": (),
    "backward": (0,),
    "backward-input": (0,),
    "backward-weight": (1,),
    "backward-all": (0, 1, 2),
    "forward+backward": (0, 1, 2),
}


@dataclass(frozen=True)
class Case:
    """An operator and its input shape.

    Attributes:
        op: one of OPS.
        shape: the input's; (N, I, S) for a recurrent cell, (T, N, I, S) for a sequence.
        kernel: size of the window in each dimension; the padding is "same", in one dimension
            causal, before SiLU.
        stride: of the window, in each dimension.
        dilation: of the window, in each dimension.
        groups: channel groups of the involution.
    """

    op: str
    shape: tuple[int, ...]
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def padding(self) -> int:
        """Return the "same" padding: with stride 1 the output has the input's size."""
        return self.dilation * (self.kernel - 1) // 2

    @property
    def label(self) -> str:
        """Return the table's label: NxCxHxW or NxCxT, kernel, stride, dilation, groups."""
        text = "x".join(map(str, self.shape))
        if self.op in WINDOWED:
            text += f" k{self.kernel} s{self.stride}"
            text += f" d{self.dilation}" if self.dilation > 1 else ""
            text += f" g{self.groups}" if self.groups > 1 else ""
        return text

    @property
    def passes(self) -> list[str]:
        """Return the passes to time."""
        if self.op in CONVOLVED:
            return [name for name in PASSES if name != "backward"]
        if self.op in ("batch_norm", *recurrent.NAMES):
            return ["forward", "backward-all", "forward+backward"]
        return ["forward", "backward", "forward+backward"]

    @property
    def formats(self) -> list[str]:
        """Return the memory formats to time; shapes other than images and sequences have one."""
        images = len(self.shape) == 4 and self.op not in recurrent.NAMES
        return list(FORMATS) if images or self.op == "depthwise1d" else ["nchw"]

    def function(self) -> Callable[..., Tensor]:
        """Return this project's operator."""
        if self.op in recurrent.NAMES:
            return recurrent.ours(self.op)
        if self.op in ("gelu", "exp", "pool"):
            return {"gelu": ops.gelu, "exp": ops.exp, "pool": ops.global_avg_pool2d}[self.op]
        if self.op == "max_pool":
            return lambda x: ops.max_pool2d(x, self.kernel, self.stride, self.padding)
        if self.op == "batch_norm":
            return lambda x, w, b: ops.batch_norm_act2d(x, None, None, w, b, training=True)
        if self.op == "ncrelu":
            return lambda x: ops.ncrelu(x, min(1, x.dim() - 1))
        if self.op == "involution":
            return lambda x, w: ops.involution2d(x, w, self.stride, self.padding, self.dilation)
        if self.op == "depthwise1d":
            return lambda x, w, b: ops.depthwise_conv1d(
                x, w, b, padding="causal", activation="silu"
            )
        return lambda x, w, b: ops.depthwise_conv2d(
            x, w, b, self.stride, self.padding, self.dilation
        )

    def composition(self) -> Callable[..., Tensor]:
        """Return the same function composed of PyTorch operators."""
        if self.op in recurrent.NAMES:
            return recurrent.composition(self.op)
        if self.op == "gelu":
            return lambda x: x * torch.sigmoid(1.702 * x)
        if self.op == "exp":
            return torch.exp
        if self.op == "pool":
            return lambda x: F.adaptive_avg_pool2d(x, 1)
        if self.op == "max_pool":
            return lambda x: F.max_pool2d(x, self.kernel, self.stride, self.padding)
        if self.op == "batch_norm":
            return lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True))
        if self.op == "ncrelu":
            return lambda x: torch.cat((x.clamp(min=0), x.clamp(max=0)), min(1, x.dim() - 1))
        if self.op == "involution":
            return self._unfolded
        if self.op == "depthwise1d":
            padding, (c, t) = self.kernel - 1, self.shape[1:]
            return lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=padding, groups=c)[..., :t])
        return lambda x, w, b: F.conv2d(
            x, w, b, self.stride, self.padding, self.dilation, groups=x.shape[1]
        )

    def _unfolded(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the involution by `F.unfold`, multiply and sum."""
        n, groups, _, _, height, width = weight.shape
        windows = F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        windows = windows.view(n, groups, -1, self.kernel, self.kernel, height, width)
        return (windows * weight.unsqueeze(2)).sum((3, 4)).view(n, x.shape[1], height, width)

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Return the input, weight and bias, drawn with a fixed seed.

        Batch normalisation has float32 parameters, as under autocast.
        """
        generator = torch.Generator(device).manual_seed(0)
        shapes: list[tuple[int, ...]] = [self.shape]
        if self.op in DEPTHWISE:
            channels, *image = self.shape[1:]
            shapes += [(channels, 1, *[self.kernel] * len(image)), (channels,)]
        if self.op == "batch_norm":
            shapes += [(self.shape[1],)] * 2
        if self.op == "involution":
            shapes += [(self.shape[0], self.groups, self.kernel, self.kernel, *self.output_size)]
        if self.op in recurrent.NAMES:
            shapes = recurrent.shapes(self.op, self.shape)
        tensors = [torch.randn(s, device=device, generator=generator) for s in shapes]
        if self.op in recurrent.NAMES:
            tensors[1] /= self.shape[-1] ** 0.5  # keeps the state bounded over the steps
        if self.op == "batch_norm":
            return [tensors[0].to(dtype), *tensors[1:]]
        return [x.to(dtype) for x in tensors]

    def lay_out(self, inputs: list[Tensor], memory_format: torch.memory_format) -> None:
        """Convert the images in `inputs` to `memory_format`, in place."""
        inputs[0] = lay_out(inputs[0], memory_format)
        if self.op == "involution":  # its weight is an image with G·kH·kW channels
            kernels = inputs[1].flatten(1, 3).contiguous(memory_format=memory_format)
            inputs[1] = kernels.view(inputs[1].shape)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Return the output's size without N and C."""
        return tuple((side - 1) // self.stride + 1 for side in self.shape[2:])

    def elements(self) -> tuple[int, int]:
        """Return the number of input elements and of output elements."""
        if self.op in recurrent.NAMES:
            *rows, columns, state = self.shape
            return math.prod(rows) * columns, math.prod(rows) * state
        size = math.prod(self.shape)
        if self.op in WINDOWED:
            return size, math.prod((*self.shape[:2], *self.output_size))
        if self.op == "pool":
            return size, self.shape[0] * self.shape[1]
        return size, size * (2 if self.op == "ncrelu" else 1)

    def floor_ms(self, what: str, itemsize: int, copy_rate: float, fma_rate: float) -> float:
        """Return the roofline bound in ms: max(bytes / `copy_rate`, FMAs / `fma_rate`).

        The bytes count each tensor of the pass once, with the involution's kernels and without
        the convolution's filters.
        """
        size, out = self.elements()
        # Saved elements that backward reads, per input element; ncrelu saves two bits.
        needed = {"pool": 0.0, "max_pool": 0.0, "ncrelu": 0.25 / itemsize}.get(self.op, 1.0)
        moved, convolutions = {
            "forward": (size + out, 1),
            "backward": ((1 + needed) * size + out, 0),
            "backward-input": (size + out, 1),
            "backward-weight": (size + out, 1),
            "backward-all": (2 * size + out, 2),
            "forward+backward": ((2 + needed) * size + 2 * out, 3),
        }[what]
        taps = self.kernel ** (len(self.shape) - 2)
        fmas = convolutions * out * taps if self.op in CONVOLVED else 0
        if self.op == "involution":  # the channels of a group share a kernel
            moved += fmas * self.groups // self.shape[1]
        if self.op in recurrent.NAMES:
            fmas = convolutions * out * 3 * (self.shape[-1] + self.shape[-2])
        return 1e3 * max(moved * itemsize / copy_rate, fmas / fma_rate)


def cases(device: str) -> Iterator[Case]:
    """Yield all cases, with smaller batches for the CPU."""
    cpu = device == "cpu"
    for op in ("gelu", "exp", "ncrelu", "pool"):
        yield Case(op, (16 if cpu else 256, 64, 112, 112))
        yield Case(op, (8 if cpu else 64, 64, 56, 56))
        yield Case(op, (128 if cpu else 1024, 6, 28, 28))
        if op != "pool":
            yield Case(op, ((1 << 20) + 3,))
    yield Case("pool", (8 if cpu else 128, 2048, 7, 7))
    yield Case("pool", (1, 3, 2048, 2048))
    for n, cpu_n, c, side, k in (
        (256, 16, 64, 112, 2),
        (64, 8, 64, 56, 2),
        (1024, 128, 6, 28, 2),
        (1024, 128, 16, 10, 2),
        (256, 16, 64, 112, 3),
        (64, 8, 97, 57, 3),
    ):
        yield Case("max_pool", (cpu_n if cpu else n, c, side, side), k, 2)
    for c, side in ((96, 112), (144, 56), (384, 14), (960, 7)):
        yield Case("batch_norm", (8 if cpu else 128, c, side, side))
    for n, cpu_n, c, h, w, k, stride, dilation in (
        (64, 4, 144, 56, 56, 3, 1, 1),
        (64, 4, 144, 56, 56, 3, 2, 1),
        (64, 4, 96, 56, 56, 7, 1, 1),
        (128, 8, 512, 14, 14, 5, 1, 1),
        (1024, 128, 6, 28, 28, 5, 1, 1),
        (32, 1, 384, 14, 14, 31, 1, 1),
        (1, 1, 144, 56, 56, 3, 1, 1),
        (1, 1, 144, 56, 56, 3, 2, 1),
        (1, 1, 96, 56, 56, 7, 1, 1),
        (16, 2, 256, 32, 32, 3, 1, 2),
        (64, 4, 144, 57, 57, 3, 1, 1),
        (64, 4, 97, 57, 57, 3, 2, 1),
    ):
        yield Case("depthwise", (cpu_n if cpu else n, c, h, w), k, stride, dilation)
    for n, c, t, k in (
        (8, 2048, 2048, 3),
        (1, 12288, 16384, 4),
        (8, 2048, 2048, 4),
        (8, 768, 2048, 7),
        (8, 1024, 2048, 15),
        (4, 1024, 4096, 31),
        (4, 512, 4096, 128),
    ):
        if cpu:
            n, c, t = min(n, 2), min(c, 512), 2048
        yield Case("depthwise1d", (n, c, t), k)
    for n, cpu_n, c, side, k, stride, groups in (
        (32, 4, 64, 56, 7, 1, 4),
        (32, 4, 256, 14, 7, 1, 16),
        (32, 4, 128, 56, 7, 2, 8),
        (32, 4, 64, 57, 3, 1, 4),
        (1024, 128, 6, 28, 5, 1, 2),
        (1, 1, 256, 14, 7, 1, 16),
    ):
        shape = (cpu_n if cpu else n, c, side, side)
        yield Case("involution", shape, k, stride, groups=groups)
    yield Case("lltm_cell", (16, 32, 128))
    yield Case("lltm", (28, 256, 28, 128))


def contexts(op: str, device: str) -> Mapping[str, Callable[[], AbstractContextManager[object]]]:
    """Return context managers for the eager peers: for convolution, cuDNN or oneDNN on and off."""
    if op not in DEPTHWISE:
        return {"eager": nullcontext}
    if device == "cuda":
        return {
            "cudnn": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
            "no cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
        }
    return {
        "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=True),
        "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    }


def lay_out(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return an image [N, C, H, W] or a sequence [N, C, T] in `memory_format`."""
    if x.dim() == 4 or memory_format == torch.contiguous_format:
        return x.contiguous(memory_format=memory_format)
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def pass_call(
    what: str, function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> Callable[[], dict[str, Tensor]]:
    """Return a call that runs one pass and returns its results by name.

    Backward passes run through autograd, over a graph built once and retained. Only the inputs
    that the pass differentiates require gradients.
    """
    wanted = [i for i in PASSES[what] if i < len(inputs)]
    names = [("grad_input", "grad_weight", "grad_bias")[i] for i in wanted]
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    targets = [leaves[i] for i in wanted]
    if what == "forward":
        return lambda: {"output": function(*leaves)}
    if what == "forward+backward":

        def step() -> dict[str, Tensor]:
            output = function(*leaves)
            return dict(zip(names, torch.autograd.grad(output, targets, grad), strict=True))

        return step
    output = function(*leaves)
    return lambda: dict(
        zip(names, torch.autograd.grad(output, targets, grad, retain_graph=True), strict=True)
    )


def reference_results(case: Case, inputs: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients in float64, by name."""
    leaves = [x.double().requires_grad_() for x in inputs]
    with torch.backends.mkldnn.flags(enabled=False):
        output = case.composition()(*leaves)
        grads = torch.autograd.grad(output, leaves, grad.double())
    if case.op == "ncrelu":  # at x = 0 clamp's gradient is that of both halves, ours is 0
        grads = (grads[0] * (leaves[0] != 0),)
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    return dict(zip(names, (output.detach(), *grads), strict=False))


def smallest_subnormal(dtype: torch.dtype) -> float:
    """Return the smallest positive number: the ulp of every subnormal number."""
    return float(torch.finfo(dtype).tiny * 2.0 ** (1 - MANTISSA_BITS[dtype]))


def ulps(x: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |x − exact| in ulp of `dtype` at `exact`."""
    exponent = torch.frexp(exact).exponent - MANTISSA_BITS[dtype]
    unit = torch.ldexp(torch.ones_like(exact), exponent).clamp_(min=smallest_subnormal(dtype))
    return (x.double() - exact).abs_().div_(unit)


def find_error(
    case: Case, results: dict[str, Tensor], exact: dict[str, Tensor], grad: Tensor
) -> str | None:
    """Return a message if a result differs from the float64 one by more than its tolerance.

    Elementwise operators: 4 ulp in float32 and 1.5 ulp in 16 bits; 1 ulp more for the gradient of
    exp, computed from the rounded output; gelu also passes within 1e-7. Other operators: relative
    error of the norm up to 1e-6, and up to 1e-5 where terms cancel (average pooling, batch
    normalisation, LLTM); in 16 bits 0.5 ulp more, or 8 ulp for the LLTM, which rounds its state
    every step.
    """
    for name, x in results.items():
        if case.op not in ELEMENTWISE:
            # The rounding error if every element were subnormal.
            subnormal = smallest_subnormal(x.dtype) / 2 * x.numel() ** 0.5
            error = relative_error(x, exact[name], free=subnormal)
            limit = 1e-6 if case.op in WINDOWED else 1e-5
            rounding = (16 if case.op in recurrent.NAMES else 1) * 2.0 ** -MANTISSA_BITS[x.dtype]
            limit += rounding if x.dtype != torch.float32 else 0
        else:
            distance = ulps(x, exact[name], x.dtype)
            if case.op == "gelu":
                scale = grad.double().abs().clamp(min=1) if name == "grad_input" else 1
                distance[(x.double() - exact[name]).abs() <= 1e-7 * scale] = 0
            error = float(distance.max())
            limit = 4 if x.dtype == torch.float32 else 1.5
            limit += case.op == "exp" and name == "grad_input"
        if not error <= limit:
            return f"{name} is off by {error:.3g}, allowed is {limit:.3g}"
    return None


def relative_error(x: Tensor, exact: Tensor, free: float = 0.0) -> float:
    """Return max(‖x − exact‖ − free, 0) / ‖exact‖."""
    return float(((x.double() - exact).norm() - free).clamp(min=0) / exact.norm())
