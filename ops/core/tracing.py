"""Calls that are recorded for later: by torch.export, torch.jit.trace or torch.fx."""

from typing import Any

import torch
from torch import nn
from torch.fx import Proxy, Tracer

from ops.core.torch_private import is_traced


def is_recorded(input: Any) -> bool:
    """Return whether a call with `input` is recorded for later, in any mode of the module.

    Layers then call PyTorch's operators, which later passes (quantisation, switching to evaluation)
    recognise. torch.compile does not count: it traces again when the mode changes.
    """
    return isinstance(input, Proxy) or torch.compiler.is_exporting() or is_traced()


def record_leaf(module: nn.Module, input: Proxy, *args: Any) -> Proxy:
    """Record a call of `module` as one node of torch.fx, as for the layers of torch.nn.

    Raises:
        TypeError: `module` is the traced module itself.
    """
    tracer = input.tracer
    path = tracer.path_of_module(module) if isinstance(tracer, Tracer) else ""
    if not path:
        name = type(module).__name__
        raise TypeError(f"{name}: torch.fx records a call of this layer; trace a module with it")
    return tracer.create_proxy("call_module", path, (input, *args), {})
