"""Every private name of PyTorch that the operators use, and why no public one does.

`scripts/check_torch.sh` runs the tests with another version. Only `ops/core/eager`, which is
compiled for one version, relies on more.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import (  # torch.func has no public counterpart
    enable_inplace_requires_grad as enable_inplace_requires_grad,
)
from torch._functorch.utils import (  # allows SingleLevelFunction below a transform
    enable_single_level_autograd_function as enable_single_level_autograd_function,
)
from torch._ops import OpOverload as OpOverload  # the type of torch.ops.x.y.default
from torch.autograd import forward_ad

from ops.core.library import EAGER

# An autograd.Function for one level of torch.func. The public class is for all levels at once, and
# cannot be registered as a dispatcher kernel.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction

# Dispatch to the backend's kernel. Public code can do so only in C++.
below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd

# Enable forward-mode AD, which torch.func disables while it runs a kernel.
enable_forward_ad: Callable[[bool], AbstractContextManager[None]] = forward_ad._set_fwd_grad_enabled

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def any_requires_grad(args: tuple[Any, ...]) -> bool:
    """Return whether a tensor among `args` requires grad; in C++, as it runs at every call."""
    return torch._C._any_requires_grad(*args)


def forward_mode() -> bool:
    """Return whether a forward-mode AD level is entered."""
    return forward_ad._current_level >= 0


def below_autocast(device: str) -> AbstractContextManager[None]:
    """Disable the autocast kernels of a device type, as at::autocast kernels do."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key)
    )
    return guard


def is_traced() -> bool:
    """Return whether torch.jit.trace records; torch.jit.is_tracing is true in scripts only."""
    return torch._C._get_tracing_state() is not None


def suggest_memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of an output shaped like `x`; is_channels_last of layout.h."""
    return torch._prims_common.suggest_memory_format(x)


def version_of(x: Tensor) -> int:
    """Return the version counter, which every change in place raises."""
    return x._version


def direct(
    op: OpOverload, otherwise: Callable[..., Any] | None = None, *, rank: int = 0
) -> Callable[..., Any]:
    """Return a C function of all arguments of `op` that returns the first output.

    It calls `otherwise` instead where an argument has not exactly the type in the schema (or is one
    int for two), under modes, transforms and traces. Without the eager library, return `otherwise`.
    torch.compile cannot trace the function.

    Args:
        op: the operator.
        otherwise: the function for all other calls; None: `op` itself, which takes bools for ints.
        rank: the rank of the first argument, or 0 for any.
    """
    if otherwise is None:
        otherwise = op._op
    if not hasattr(torch.ops.lenet_ops_eager, "register_autograd"):
        return otherwise
    eager = importlib.import_module(f"ops.{EAGER}")
    return eager.direct(op.name().removesuffix(".default"), rank, otherwise)


def name_of(op: OpOverload) -> str:
    """Return an operator's name without its namespace."""
    return op._opname


def schema_of(op: OpOverload) -> torch._C.FunctionSchema:
    """Return an operator's schema."""
    return op._schema


def onnx_sizes(value: Any) -> list[int | None] | None:
    """Return the sizes of a torch._C.Value as the TorchScript exporter knows them."""
    from torch.onnx import symbolic_helper  # late: `import ops` does without torch.onnx

    return symbolic_helper._get_tensor_sizes(value)


def onnx_argument(value: Any, kind: str) -> Any:
    """Return a torch._C.Value as a Python value: "i" int, "is" ints, "v" the value itself."""
    from torch.onnx import symbolic_helper

    return symbolic_helper._parse_arg(value, kind)  # type: ignore[arg-type]
