"""Loads the compiled operators; what every operator's Python side shares."""

import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TORCH_TARGET = (2, 10)
BUILD_COMMAND = "pip install --no-build-isolation -e ."
fragment = torch.library.Library("lenet_ops", "FRAGMENT")
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (int, torch.SymInt, Integral)  # the last: NumPy's


def load() -> None:
    """Loads ops/_C and, where torch is a CUDA build, ops/_C_cuda.

    Raises:
        ImportError: torch is older than the libraries allow, or they have not been built.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_TARGET:
        raise ImportError(f"ops needs torch >= 2.10, this is torch {torch.__version__}")
    folder = Path(__file__).parent
    cpu = next(folder.glob("_C.*"), None)
    if cpu is None:
        raise ImportError(
            f"the operators are not compiled: run `{BUILD_COMMAND}` in the project's folder"
        )
    torch.ops.load_library(cpu)
    cuda = next(folder.glob("_C_cuda.*"), None)
    if cuda is None or torch.version.cuda is None:
        return
    try:
        torch.ops.load_library(cuda)
    except OSError as error:
        warnings.warn(
            f"the operators' CUDA kernels cannot be loaded beside torch {torch.__version__}, "
            f"only the CPU works ({error}); rebuild them with `{BUILD_COMMAND}`",
            stacklevel=2,
        )


def check_tensor(op: str, name: str, value: object) -> None:
    """Checks what C++ cannot: that `value` is a tensor, and of a floating dtype.

    Raises:
        TypeError: not a tensor.
        NotImplementedError: a dtype other than float64, float32, bfloat16 and float16.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}(): argument '{name}' must be Tensor, not {type(value).__name__}")
    if value.dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise NotImplementedError(
            f"{op}(): not implemented for dtype {value.dtype} of '{name}'; allowed are {allowed}"
        )


def check_int(op: str, name: str, value: object) -> None:
    """Checks that `value` is an int.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, INTEGERS):
        raise TypeError(f"{op}(): argument '{name}' must be int, not {type(value).__name__}")


def pair(op: str, name: str, value: int | Sequence[int], least: int) -> tuple[int, int]:
    """Returns `value` as (vertical, horizontal).

    Raises:
        TypeError: not an int or a pair of ints.
        RuntimeError: less than `least`.
    """
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(values) != 2 or not all(isinstance(v, INTEGERS) for v in values):
        raise TypeError(
            f"{op}(): argument '{name}' must be an int or a pair of ints, not {value!r}"
        )
    if min(values) < least:
        raise RuntimeError(f"{op}(): '{name}' must be at least {least}, got {value!r}")
    return values


def suggest_memory_format(x: Tensor) -> torch.memory_format:
    """Returns the format that an output shaped like `x` takes, decided as torch decides it."""
    return torch._prims_common.suggest_memory_format(x)  # the kernels' is_channels_last, on fakes


def image_like(x: Tensor, height: Any, width: Any) -> Tensor:
    """Returns an empty image tensor of another size, otherwise like `x` [N, C, H, W]."""
    return torch.empty(
        (*x.shape[:2], height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=suggest_memory_format(x),
    )


def window_places(
    op: str,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Returns the places of a kernel in each dimension: the output's size, for fakes.

    Raises:
        RuntimeError: the kernel does not fit.
    """
    places = []
    for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        padded, span = size + 2 * p, d * (k - 1) + 1
        torch._check(
            padded >= span,
            lambda span=span, padded=padded: (  # type: ignore[misc]
                f"{op}: the dilated kernel must fit into the padded input; "
                f"the kernel spans {span}, the padded input {padded}"
            ),
        )
        places.append((padded - span) // s + 1)
    return places


def batch_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Returns vmap's operands with the mapped dimension first, expanded where one has none."""
    return [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
        for d, x in zip(in_dims, tensors, strict=True)
    ]


def one_by_one(
    op: torch._ops.OpOverload, info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A rule for vmap where samples share no kernel: the outputs of each, stacked."""
    samples = [
        op(
            *(
                x.select(d, i) if isinstance(x, Tensor) and d is not None else x
                for d, x in zip(in_dims, args, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return outputs, (0,) * len(outputs)


def register_autocast(
    op: torch._ops.OpOverload, device: str, dtype: torch.dtype | None = None
) -> None:
    """Makes autocast regions cast an operator's tensors; float64 stays, as do tensors elsewhere.

    Args:
        op: the operator.
        device: of the regions, "cpu" or "cuda".
        dtype: what is cast to; None: the region's dtype.
    """
    key = f"Autocast{device.upper()}"
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type != device or x.dtype == torch.float64:
            return x
        return x.to(dtype or torch.get_autocast_dtype(device))

    def autocast(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*map(cast, args))

    fragment.impl(op._opname, autocast, key)


def register_autograd(
    op: torch._ops.OpOverload,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    vmap: Callable[..., Any],
    differentiates: bool = False,
) -> None:
    """Registers an operator's gradient and its vmap rule.

    Unlike torch.library.register_autograd, this also works under torch.func's grad, jacrev and
    their compositions with vmap.

    Args:
        op: the operator.
        setup_context: f(ctx, inputs, output), saves what `backward` needs.
        backward: f(ctx, *grad_outputs), returns one gradient (or None) an input.
        vmap: f(info, in_dims, *inputs), returns the outputs and their mapped dimensions.
        differentiates: whether `backward` itself takes gradients.
    """

    def forward(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def record(ctx: Any, *args: Any) -> Any:
        output = forward(*args)
        setup_context(ctx, args, output)
        return output

    def run_backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled() or differentiates:
            return backward(ctx, *grad_outputs)
        with torch._C._AutoDispatchBelowAutograd():  # nothing to record: the shorter way
            return backward(ctx, *grad_outputs)

    def function(name: str, **methods: Callable[..., Any]) -> Any:
        static = {key: staticmethod(method) for key, method in methods.items()}
        return type(f"{op._opname}_{name}", (torch.autograd.Function,), static)

    # A Function with setup_context is what transforms need, but inspects a signature every call.
    plain = function("function", forward=record, backward=run_backward)
    transformed = function(
        "transform", forward=forward, setup_context=setup_context, backward=backward, vmap=vmap
    )

    def autograd(*args: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return forward(*args)
        if not torch._C._are_functorch_transforms_active():
            return plain.apply(*args)
        # The transform's interpreter masks its own key below itself, but a Function needs it.
        key = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
        with torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(key),
            torch._C._dispatch_tls_local_exclude_set() - torch._C.DispatchKeySet(key),
        ):
            return transformed.apply(*args)

    fragment.impl(op._opname, autograd, "Autograd")
    torch.library.register_vmap(op, vmap)
