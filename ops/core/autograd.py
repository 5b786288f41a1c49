"""Autograd kernels in Python.

Without the eager library, they run every operator's gradient. With it, they run only forward mode,
torch.func transforms and double backward.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ops.core.gradient import Gradient, as_tuple, is_mutable
from ops.core.memory import convert_out_of_memory
from ops.core.torch_private import (
    OpOverload,
    SingleLevelFunction,
    any_requires_grad,
    any_tangent,
    below_autograd,
    enable_forward_ad,
    enable_single_level_autograd_function,
    is_batched,
    name_of,
    schema_of,
    transforms_active,
    unpack_dual,
)


def make_kernel(
    op: OpOverload,
    gradient: Gradient,
    jvp: Callable[..., Any] | None,
    variant: OpOverload | None,
) -> Callable[..., Any]:
    """Return the Autograd kernel of `op`; see registration.register for the arguments."""
    count = len(schema_of(op).arguments)
    mutable = [(i, x.name) for i, x in enumerate(schema_of(op).arguments) if is_mutable(x)]

    def without_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with below_autograd():
                return function(*args)

        return convert_out_of_memory(call, name_of(op))

    forward, call_once = without_autograd(op), without_autograd(gradient.call)

    def record(ctx: Any, *args: Any) -> Any:
        if transforms_active():
            with torch.enable_grad(), enable_forward_ad(True):  # for outer transforms
                output = forward(*args)
        else:
            output = forward(*args)
        outputs = as_tuple(output)
        values = gradient.values(args, outputs)
        ctx.save_for_backward(*map(_tensor, values))
        ctx.constants = [None if isinstance(x, Tensor) else x for x in values]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[gradient.grads :])
        # torch calls `apply_jvp` immediately after `record` if an argument has a tangent.
        ctx.arguments = [None if isinstance(x, Tensor) else x for x in args]
        ctx.save_for_forward(*map(_tensor, args), *outputs)
        return output

    def apply_jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        with enable_forward_ad(True):  # outer transforms may differentiate the tangent
            saved = [x if x is None else unpack_dual(x).primal for x in ctx.saved_tensors]
            inputs = [x if x is not None else c for x, c in zip(saved, ctx.arguments, strict=False)]
            return cast(Any, jvp)(inputs, saved[len(inputs) :], tangents)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * count
        saved = ctx.saved_tensors  # not below autograd: checkpointing may recompute here
        higher_order = (
            gradient.eager is None
            or torch.is_grad_enabled()
            or any_tangent(x for x in (*grads, *saved) if not is_batched(x))
        )
        values = [c if x is None else x for x, c in zip(saved, ctx.constants, strict=True)]
        call = gradient.call if higher_order else call_once
        found = as_tuple(call(values, grads, ctx.needs_input_grad))
        return *found, *[None] * (count - len(found))

    # One node for one level of torch.func: each active transform dispatches to `kernel` again.
    function: Any = type(
        f"{name_of(op)}_function",
        (SingleLevelFunction,),
        {
            "forward": staticmethod(record),
            "backward": staticmethod(backward),
            "jvp": staticmethod(apply_jvp),
        },
    )

    def kernel(*args: Any) -> Any:
        forward_mode = any_tangent(args)
        if not forward_mode and not (torch.is_grad_enabled() and any_requires_grad(args)):
            return forward(*args)
        for index, name in mutable:
            if args[index] is not None and args[index].requires_grad:
                raise RuntimeError(
                    f"{name_of(op)} is not differentiable with respect to argument '{name}'"
                )
        if variant is not None and (jvp is None or not (forward_mode or transforms_active())):
            return variant(*args)[0]
        if transforms_active():
            with enable_single_level_autograd_function():
                return function.apply(*args)
        return function.apply(*args)

    return kernel


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None
