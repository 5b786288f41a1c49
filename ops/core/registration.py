"""Register operators with PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ops.core import autocast as python_autocast
from ops.core import autograd, check
from ops.core.gradient import Gradient, make_gradient
from ops.core.library import has_eager
from ops.core.sharding import Sharding, pending
from ops.core.torch_private import OpOverload, name_of, schema_of

Autocast = Mapping[str, torch.dtype | None]
REGION: Autocast = {"cpu": None, "cuda": None}  # cast to the region's dtype, as conv2d

_fragment = torch.library.Library("lenet_ops", "FRAGMENT")
_gradients: dict[OpOverload, Gradient] = {}
_decompositions: dict[OpOverload, Callable[..., Any]] = {}


def register(
    op: OpOverload,
    *,
    fake: Callable[..., Any],
    backward: OpOverload | Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    vmap: Callable[..., Any],
    sharding: Sharding,
    autograd_variant: OpOverload | None = None,
    autocast: Autocast | None = None,
    flops: Callable[..., int] | None = None,
    decomposition: Callable[..., Any] | None = None,
) -> None:
    """Register an operator with PyTorch's subsystems.

    Gradients also work under torch.func's transforms (grad, jacrev, jvp, jacfwd) and with vmap in
    them. torch.library.register_autograd allows neither.

    Args:
        op: the operator.
        fake: f(*args), returns uninitialised outputs of the right shape, dtype and layout.
        backward: a backward operator (see gradient.py), called in C++ if the eager library is
            loaded; or f(args, grads, needed), returns gradients of the leading arguments.
        jvp: f(args, outputs, tangents), returns one tangent for each output. A tangent is None
            if the argument is constant or the output not differentiable.
        vmap: f(info, in_dims, *args), returns outputs and their mapped dimensions.
        sharding: strategies of DTensor, see sharding.py.
        autograd_variant: an operator with the arguments of `op` that also returns the tensors that
            its gradient needs, registered before `op`. Autograd calls it instead of `op`; if there
            is a `jvp`, not in torch.func's transforms and forward mode.
        autocast: for each device type, the dtype to cast to (None: that of the autocast region).
        flops: f(*args, out_shape=...), returns FLOPs; takes shapes in place of tensors.
        decomposition: f(*args), computes all outputs by ATen operators, for exported programs.

    Raises:
        TypeError: the schema of `backward` does not fit that of `op`, or no gradient is given.
    """
    if backward is not None:
        _gradients[op] = make_gradient(op, backward)
    elif autograd_variant is not None:
        _gradients[op] = _gradients[autograd_variant]
    else:
        raise TypeError(f"{name_of(op)}: neither backward nor autograd_variant")
    pending[op] = sharding
    if decomposition is not None:
        _decompositions[op] = decomposition

    torch.library.register_fake(op.name(), _checked_fake(op, fake))
    kernel = autograd.make_kernel(op, _gradients[op], jvp, autograd_variant)
    _fragment.impl(name_of(op), kernel, "Autograd")
    torch.library.register_vmap(op, vmap)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.lenet_ops, name_of(op)))(flops)
    if has_eager():
        variant = autograd_variant or op
        call = _gradients[variant].eager or ()  # (): Python computes gradients
        torch.ops.lenet_ops_eager.register_autograd(name_of(op), name_of(variant), *call)
    for device, dtype in (autocast or {}).items():
        if has_eager():
            torch.ops.lenet_ops_eager.register_autocast(name_of(op), device, dtype)
        else:
            cast = python_autocast.make_kernel(op, device, dtype)
            _fragment.impl(name_of(op), cast, f"Autocast{device.upper()}")


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return decompositions of the forward operators into ATen, for ExecuTorch, LiteRT or Core ML.

    :func:`batch_norm_act2d` needs none: torch.export records it as PyTorch's operators. Usage::

        program = torch.export.export(net, (x,)).run_decompositions(decompositions())

    For a program of core ATen operators only, add them to `torch.export.default_decompositions()`.
    """
    return dict(_decompositions)


def _checked_fake(op: OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake` with checks of dtype and devices.

    PyTorch calls fakes even if the devices of arguments differ, such as meta and CPU.
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
