"""Calls that torch.export, torch.jit.trace or torch.fx trace to a graph."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from ops.core.torch_private import is_traced


def is_traced_to_graph(input: Any) -> bool:
    """Return whether torch.export, torch.jit.trace or torch.fx traces a call with `input`.

    The graph is then used in training and evaluation alike, so layers call PyTorch's operators,
    which later passes (quantisation, `eval`) recognise. torch.compile does not count: it traces
    anew when the mode changes.
    """
    return isinstance(input, Proxy) or torch.compiler.is_exporting() or is_traced()


def constant(size: Any) -> Any:
    """Return the size of a parameter as an int also in torch.jit.trace, where it is a tensor."""
    if not isinstance(size, Tensor):
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return int(size)


def record_call(function: Callable[..., Any], input: Proxy, *args: Any) -> Proxy:
    """Record a call of `function` as one node of torch.fx."""
    return input.tracer.create_proxy("call_function", function, (input, *args), {})


def record_leaf(module: nn.Module, input: Proxy, *args: Any) -> Proxy:
    """Record a call of `module` as one node of torch.fx, as for the layers of torch.nn.

    Raises:
        TypeError: `module` is the traced module itself.
    """
    tracer = input.tracer
    path = tracer.path_of_module(module) if isinstance(tracer, Tracer) else ""
    if not path:
        name = type(module).__name__
        raise TypeError(
            f"{name}: torch.fx cannot trace this layer alone: trace a module that contains it"
        )
    return tracer.create_proxy("call_module", path, (input, *args), {})
