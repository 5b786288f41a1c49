"""The operator table, a file for each operator in entries/, and its parametrisations."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from tests.ops import entries
from tests.ops.operator_entry import Operator

OPERATORS: tuple[Operator, ...] = tuple(
    import_module(f"{entries.__name__}.{module.name}").OPERATOR
    for module in iter_modules(entries.__path__)
)

EXPORTED = tuple(op for op in OPERATORS if op.exported)


def _each_case(operators: tuple[Operator, ...]) -> pytest.MarkDecorator:
    cases = [pytest.param(op, case, id=f"{op} {case}") for op in operators for case in op.cases]
    return pytest.mark.parametrize(("op", "case"), cases)


each_operator = pytest.mark.parametrize("op", OPERATORS, ids=str)
each_exported = pytest.mark.parametrize("op", EXPORTED, ids=str)
each_case, each_exported_case = map(_each_case, (OPERATORS, EXPORTED))
DEVICES = ["cpu"]
if torch.cuda.is_available():  # else thousands of items would be made and deselected
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.cuda))
each_device = pytest.mark.parametrize("device", DEVICES)
