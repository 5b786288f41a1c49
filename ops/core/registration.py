"""Register operators with PyTorch; check each declaration against the operator's schema."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ops.core import autocast as python_autocast
from ops.core import autograd, check
from ops.core.gradient import FunctionGradient, Gradient, OperatorGradient
from ops.core.torch_private import OpOverload, name_of, schema_of

Autocast = Mapping[str, torch.dtype | None]
REGION: Autocast = {"cpu": None, "cuda": None}  # the autocast region's dtype, as for conv2d

_fragment = torch.library.Library("lenet_ops", "FRAGMENT")
_gradients: dict[OpOverload, Gradient] = {}


def register(
    op: OpOverload,
    *,
    fake: Callable[..., Any],
    backward: OpOverload | Callable[..., Any],
    jvp: Callable[..., Any],
    vmap: Callable[..., Any],
    autograd_variant: OpOverload | None = None,
    autocast: Autocast | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Register fake, autograd, vmap, autocast and FLOP formula of an operator.

    Gradients also work under torch.func's transforms (grad, jacrev, jvp, jacfwd) and their
    compositions with vmap, which torch.library.register_autograd does not allow.

    Args:
        op: the operator.
        fake: f(*args), returns uninitialised outputs of the right shape, dtype and layout.
        backward: the gradient. A backward operator (see gradient.py), called in C++ if the eager
            library is loaded; or f(args, grads, needed), which returns gradients of the leading
            arguments.
        jvp: f(args, outputs, tangents), returns one tangent for each output. A tangent is None
            if the argument is constant or the output not differentiable.
        vmap: f(info, in_dims, *args), returns outputs and their mapped dimensions.
        autograd_variant: an operator with the arguments of `op` that also returns the tensors that
            its gradient needs; autograd calls it instead of `op`.
        autocast: for each device type, the dtype to cast to (None: that of the autocast region).
        flops: f(*args, out_shape=...), returns FLOPs; shapes replace tensors.

    Raises:
        TypeError: the declaration does not fit the operator's schema.
    """
    arguments = schema_of(op).arguments
    _check_takes(op, "fake", fake, len(arguments))
    _check_takes(op, "jvp", jvp, 3)
    _check_takes(op, "vmap", vmap, 2 + len(arguments))
    if flops is not None:
        _check_takes(op, "flops", flops, len(arguments), out_shape=None)
    if autograd_variant is not None and _types(autograd_variant) != _types(op):
        raise TypeError(
            f"{name_of(op)}: autograd_variant={name_of(autograd_variant)} takes other arguments"
        )
    gradient: Gradient
    if isinstance(backward, OpOverload):
        gradient = OperatorGradient(op, backward)
    else:
        _check_takes(op, "backward", backward, 3)
        gradient = FunctionGradient(backward)
    _gradients[op] = gradient

    torch.library.register_fake(op.name(), _checked_fake(op, fake))
    kernel = autograd.make_kernel(op, gradient, jvp, autograd_variant)
    _fragment.impl(name_of(op), kernel, "Autograd")
    torch.library.register_vmap(op, vmap)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.lenet_ops, name_of(op)))(flops)
    if hasattr(torch.ops.lenet_ops_eager, "register_autograd"):
        _register_eager(op, autograd_variant or op, autocast or {})
    else:
        for device, dtype in (autocast or {}).items():
            kernel = python_autocast.make_kernel(op, device, dtype)
            _fragment.impl(name_of(op), kernel, f"Autocast{device.upper()}")


def _types(op: OpOverload) -> list[tuple[str, str]]:
    return [(x.name, str(x.type)) for x in schema_of(op).arguments]


def _check_takes(
    op: OpOverload, part: str, function: Callable[..., Any], count: int, **keywords: Any
) -> None:
    try:
        inspect.signature(function).bind(*range(count), **keywords)
    except TypeError as error:
        raise TypeError(
            f"{name_of(op)}: {part} must take {count} arguments for {schema_of(op)}: {error}"
        ) from error


def _checked_fake(op: OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake` with checks of dtype and devices.

    PyTorch also calls fakes if arguments are on different devices, such as meta and CPU.
    """
    names = [argument.name for argument in schema_of(op).arguments]

    def checked(*args: Any) -> Any:
        tensors = [(n, x) for n, x in zip(names, args, strict=True) if isinstance(x, Tensor)]
        first, like = tensors[0]
        check.tensor(name_of(op), first, like)
        for name, x in tensors[1:]:
            check.strided(name_of(op), name, x)
            if x.device != like.device:
                raise RuntimeError(
                    f"{name_of(op)}: {name} must be on the device of {first} ({like.device}), "
                    f"got {x.device}"
                )
        return fake(*args)

    return checked


def _register_eager(op: OpOverload, variant: OpOverload, autocast: Autocast) -> None:
    """Register autograd and autocast with the eager library; autograd calls `variant`."""
    gradient = _gradients[variant]
    arguments: tuple[Any, ...] = ("", "", [], [])  # the gradient is a Python function
    if isinstance(gradient, OperatorGradient):
        kinds, indices, _ = zip(*gradient.sources, strict=True)
        arguments = name_of(gradient.backward), "".join(kinds), indices, gradient.tensors
    torch.ops.lenet_ops_eager.register_autograd(name_of(op), name_of(variant), *arguments)
    for device, dtype in autocast.items():
        torch.ops.lenet_ops_eager.register_autocast(name_of(op), device, dtype)
