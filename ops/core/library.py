"""Loads the compiled operators; what every operator's Python side shares."""

import re
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

TORCH_TARGET = (2, 10)
BUILD_COMMAND = "pip install --no-build-isolation -e ."
_BUILD = f"{torch.__version__}_{torch.version.git_version[:8]}"  # versions are built more than once
EAGER = "_C_eager_" + re.sub(r"\W", "_", _BUILD)  # as setup.py names it
fragment = torch.library.Library("lenet_ops", "FRAGMENT")
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALLOWED = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
INTEGERS = (int, torch.SymInt, Integral)  # the last: NumPy's


def load() -> None:
    """Loads ops/_C, and where they fit this torch ops/_C_eager and ops/_C_cuda.

    Raises:
        ImportError: torch is older than the libraries allow, or they have not been built.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_TARGET:
        raise ImportError(f"ops needs torch >= 2.10, this is torch {torch.__version__}", name="ops")
    folder = Path(__file__).parents[1]
    cpu = next(folder.glob("_C.*"), None)
    if cpu is None:
        raise ImportError(
            f"the operators are not compiled: run `{BUILD_COMMAND}` in the project's folder",
            name="ops",
        )
    try:
        torch.ops.load_library(cpu)
    except OSError as error:
        raise ImportError(
            f"the operators cannot be loaded beside torch {torch.__version__} ({error}); rebuild "
            f"them with `{BUILD_COMMAND}`",
            name="ops",
        ) from error
    _load_more(folder, EAGER, "autograd and autocast", "Python does their work")
    if torch.version.cuda is not None:
        _load_more(folder, "_C_cuda", "CUDA kernels", "only the CPU works")


def _load_more(folder: Path, name: str, what: str, without: str) -> None:
    """Loads a library that the operators can do without, if it is there."""
    library = next(folder.glob(f"{name}.*"), None)
    if library is None:
        return
    try:
        torch.ops.load_library(library)
    except OSError as error:
        warnings.warn(
            f"the operators' {what} cannot be loaded beside torch {torch.__version__}, "
            f"{without} ({error}); rebuild them with `{BUILD_COMMAND}`",
            stacklevel=3,
        )


def check_tensor(op: str, name: str, value: object) -> None:
    """Checks what C++ cannot: that `value` is a dense tensor, and of a floating dtype.

    Raises:
        TypeError: not a tensor.
        NotImplementedError: sparse, or a dtype other than float64, float32, bfloat16 and float16.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be Tensor, not {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        given = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise NotImplementedError(f"{op}: {name} must be strided, got {given}")
    if value.dtype not in FLOATING:
        raise NotImplementedError(
            f"{op}: not implemented for dtype {value.dtype} of {name}; allowed are {_ALLOWED}"
        )


def is_int(value: object) -> bool:
    """Whether `value` is an integer, of Python or NumPy; a bool counts nothing."""
    return isinstance(value, INTEGERS) and not isinstance(value, bool)


def check_int(op: str, name: str, value: object) -> None:
    """Checks that `value` is an int.

    Raises:
        TypeError: it is not.
    """
    if not is_int(value):
        raise TypeError(f"{op}: {name} must be int, not {type(value).__name__}")


def check_bool(op: str, name: str, value: object) -> None:
    """Checks that `value` is a bool: not a device or dtype in the wrong place.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be bool, not {type(value).__name__}")


def is_traced() -> bool:
    """Whether torch.jit.trace records: it takes sizes for values, and warns of comparisons."""
    return torch._C._get_tracing_state() is not None


def check_fake(
    op: str, name: str, x: Tensor, shape: Sequence[Any], like_name: str, like: Tensor
) -> None:
    """Checks a tensor as the kernels do, for fakes: its shape, and that its dtype is `like`'s.

    Raises:
        RuntimeError: it is another one.
    """
    torch._check(
        tuple(x.shape) == tuple(shape),
        lambda: f"{op}: {name} must have shape {list(shape)}, got {list(x.shape)}",
    )
    torch._check(
        x.dtype == like.dtype,
        lambda: f"{op}: {name} must have the dtype of {like_name} ({like.dtype}), got {x.dtype}",
    )


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


def batch_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Returns vmap's operands with the mapped dimension first, expanded where one has none."""
    return [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
        for d, x in zip(in_dims, tensors, strict=True)
    ]


def one_by_one(
    op: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: tuple[int | None, ...], *args: Any
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


def total(*terms: Tensor | None) -> Tensor | None:
    """Returns the sum of the terms that there are."""
    there = [term for term in terms if term is not None]
    return sum(there[1:], there[0]) if there else None


def register_autocast(
    op: torch._ops.OpOverload, device: str, dtype: torch.dtype | None = None
) -> None:
    """Makes autocast regions cast an operator's tensors; float64 stays, as do tensors elsewhere.

    Args:
        op: the operator.
        device: of the regions, "cpu" or "cuda".
        dtype: what is cast to; None: the region's dtype.
    """
    if hasattr(torch.ops.lenet_ops_eager, "register_autocast"):
        torch.ops.lenet_ops_eager.register_autocast(op._opname, device, dtype)
        return
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


def register_fake(op: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], None]:
    """Registers what tells the compiler an operator's outputs, as torch.library.register_fake does.

    PyTorch calls it for tensors of mixed devices, too, where one has no memory. So dtype and
    devices are checked before, as the kernels do.
    """
    names = [argument.name for argument in op._schema.arguments]

    def register(fake: Callable[..., Any]) -> None:
        def checked(*args: Any) -> Any:
            tensors = [(n, x) for n, x in zip(names, args, strict=True) if isinstance(x, Tensor)]
            first, like = tensors[0]
            if like.dtype not in FLOATING:
                raise RuntimeError(
                    f"{op._opname}: not implemented for dtype {like.dtype}; allowed are {_ALLOWED}"
                )
            for name, x in tensors[1:]:
                if x.device != like.device:
                    raise RuntimeError(
                        f"{op._opname}: {name} must be on the device of {first} ({like.device}), "
                        f"got {x.device}"
                    )
            return fake(*args)

        torch.library.register_fake(op._schema.name, checked)

    return register


def register_autograd(
    op: torch._ops.OpOverload,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
    vmap: Callable[..., Any],
    differentiates: bool = False,
    recorded: torch._ops.OpOverload | None = None,
) -> None:
    """Registers an operator's gradient, its directional derivative and its vmap rule.

    Unlike torch.library.register_autograd, this also works under torch.func's transforms (grad,
    jacrev, jvp, jacfwd) and their compositions with vmap.

    Args:
        op: the operator.
        setup_context: f(ctx, inputs, output), saves what `backward` needs.
        backward: f(ctx, saved, *grad_outputs) with the tensors that were saved, returns one
            gradient (or None) an input.
        jvp: f(inputs, outputs, tangents), where a tangent is None for an input that is constant;
            returns a tangent an output, None for one that is not differentiable.
        vmap: f(info, in_dims, *inputs), returns the outputs and their mapped dimensions.
        differentiates: whether `backward` itself takes gradients.
        recorded: an operator that takes the same and returns, after the one output, what its
            gradient needs: it runs in the place of `op` where reverse mode alone records.
    """
    nothing = (None,) * len(op._schema.arguments)

    def forward(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def record(ctx: Any, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # of those outside
                output = forward(*args)
        else:
            output = forward(*args)
        setup_context(ctx, args, output)
        if forward_ad._current_level >= 0:
            keep(ctx, args, output if isinstance(output, tuple) else (output,))
        return output

    def keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        """For `push`, which follows immediately if at all."""
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_forward(*(x if isinstance(x, Tensor) else None for x in inputs), *outputs)
        ctx.set_materialize_grads(False)

    def push(ctx: Any, *tangents: Tensor | None) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):  # transforms outside may differentiate this
            saved = [
                x if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors
            ]
            inputs = [x if x is not None else c for x, c in zip(saved, ctx.constants, strict=False)]
            return jvp(inputs, saved[len(inputs) :], tangents)

    def pull(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        if grad_outputs[0] is None and all(grad is None for grad in grad_outputs):
            return nothing
        saved = ctx.saved_tensors  # checkpointing may have to compute them anew, and records it
        if torch.is_grad_enabled() or differentiates or forward_ad._current_level >= 0:
            return backward(ctx, saved, *grad_outputs)
        with torch._C._AutoDispatchBelowAutograd():  # nothing to record: the shorter way
            return backward(ctx, saved, *grad_outputs)

    # Of one level, as the kernels of built-ins are: each transform calls it for its own.
    function: Any = type(
        f"{op._opname}_function",
        (torch.autograd.function._SingleLevelFunction,),
        {
            "forward": staticmethod(record),
            "backward": staticmethod(pull),
            "jvp": staticmethod(push),
            "_compiled_autograd_key": staticmethod(lambda ctx: (ctx._autograd_function_id,)),
        },
    )

    def autograd(*args: Any) -> Any:
        records = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not records and forward_ad._current_level < 0:
            return forward(*args)
        if torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return function.apply(*args)
        if recorded is not None and forward_ad._current_level < 0:
            return recorded(*args)[0]
        return function.apply(*args)

    fragment.impl(op._opname, autograd, "Autograd")
    torch.library.register_vmap(op, vmap)
