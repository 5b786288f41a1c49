"""Decompositions of the operators into ATen, for backends that know only ATen operators."""

from collections.abc import Callable
from typing import Any

from ops.core import registration
from ops.core.torch_private import OpOverload


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the table of forward operators, for ``ExportedProgram.run_decompositions``.

    For backends such as ExecuTorch and Core ML. Backward operators are not included, nor is
    :func:`batch_norm_act2d`, which torch.export records as PyTorch's operators::

        table = torch.export.default_decompositions()
        table.update(decompositions())
        program = torch.export.export(net, (x,)).run_decompositions(table)
    """
    return dict(registration.decompositions)
