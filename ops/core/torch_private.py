"""Private PyTorch names that the operators use, each with the reason.

`scripts/check_torch.sh` runs the tests with another PyTorch. Only `ops/core/eager`, which is
compiled for one version, uses other private names.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.eager_transforms import (  # no public counterpart in torch.func
    enable_inplace_requires_grad as enable_inplace_requires_grad,
)
from torch._functorch.utils import (  # allows SingleLevelFunction in a transform
    enable_single_level_autograd_function as enable_single_level_autograd_function,
)
from torch._ops import OpOverload as OpOverload  # the type of torch.ops.x.y.default
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # private in effect
from torch.nn.modules import batchnorm

NormBase = batchnorm._NormBase  # the state of nn.BatchNorm2d without its type

# Skip autograd and dispatch to the backend's kernel. The public equivalent exists only in C++.
below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd

# Enable forward-mode AD, which torch.func disables while it runs a kernel.
enable_forward_ad: Callable[[bool], AbstractContextManager[None]] = forward_ad._set_fwd_grad_enabled

_BATCHED = torch._C._dispatch_key_parse("Batched")  # of is_grads_batched, not of torch.func.vmap

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


class SingleLevelFunction(torch.autograd.function._SingleLevelFunction):
    """An autograd.Function that records one level of torch.func.

    The public class handles all levels in one call, and cannot be registered as a dispatcher
    kernel.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """Return the key of the node in compiled autograd, as torch.autograd.Function does."""
        return (ctx._autograd_function_id,)


def any_requires_grad(args: tuple[Any, ...]) -> bool:
    """Return whether a tensor among `args` requires grad (in C++, because every call runs it)."""
    return torch._C._any_requires_grad(*args)


def make_dual(x: Tensor, tangent: Tensor) -> Tensor:
    """Return `x` with a tangent, at the only level of forward-mode AD.

    Compiled graphs enter the level in C++ only: torch.autograd.forward_ad's default, the level
    that Python entered, is then −1.
    """
    return forward_ad.make_dual(x, tangent, level=0)


def unpack_dual(x: Tensor) -> forward_ad.UnpackedDualTensor:
    """Return primal and tangent (None: constant, or forward mode is disabled), as make_dual."""
    return forward_ad.unpack_dual(x, level=0)


def any_tangent(args: Iterable[Any]) -> bool:
    """Return whether a tensor among `args` has a tangent."""
    # A tensor without strides has none: unpack_dual would fail before the operator can say why.
    dense = (x for x in args if isinstance(x, Tensor) and x.layout is torch.strided)
    with disable_proxy_modes_tracing():  # else a traced graph holds the views of unpack_dual
        return any(unpack_dual(x).tangent is not None for x in dense)


def is_batched(x: Tensor | None) -> bool:
    """Return whether `x` is a batched gradient (is_grads_batched), which unpack_dual rejects."""
    return x is not None and torch._C._dispatch_keys(x).has(_BATCHED)


def below_autocast(device: str) -> AbstractContextManager[None]:
    """Disable autocast dispatch for a device type, as built-in autocast kernels do."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key)
    )
    return guard


def is_traced() -> bool:
    """Return whether torch.jit.trace is active; torch.jit.is_tracing is for scripts only."""
    return torch._C._get_tracing_state() is not None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of `module` runs hooks, its own or global ones."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def suggest_memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of outputs of operators on `x`, as is_channels_last in layout.h."""
    return torch._prims_common.suggest_memory_format(x)


def name_of(op: OpOverload) -> str:
    """Return an operator's name without its namespace."""
    return op._opname


def schema_of(op: OpOverload) -> torch._C.FunctionSchema:
    """Return an operator's schema."""
    return op._schema


def onnx_sizes(value: Any) -> list[int | None] | None:
    """Return the sizes of a torch._C.Value as the TorchScript exporter knows them."""
    from torch.onnx import symbolic_helper  # late: `import ops` does not need torch.onnx

    return symbolic_helper._get_tensor_sizes(value)


def onnx_argument(value: Any, kind: str) -> Any:
    """Return a torch._C.Value as "i" int, "b" bool, "is" ints, or "v" as it is."""
    from torch.onnx import symbolic_helper

    return symbolic_helper._parse_arg(value, kind)  # type: ignore[arg-type]


def register_sharding_strategy(op: OpOverload, strategy: Callable[..., Any]) -> None:
    """Register a sharding strategy of DTensor; see torch's register_sharding.

    That function caches a strategy without the lists of integers among the arguments, such as
    strides, so that a call with others would get its sizes.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(strategy)
    kinds = [str(argument.type) for argument in schema_of(op).arguments]
    first = next((i for i, kind in enumerate(kinds) if "Tensor" not in kind), len(kinds))
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, needs_pytree=True)
