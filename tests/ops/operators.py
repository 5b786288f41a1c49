"""The operator table, a file for each operator in entries/, and its parametrisations."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

from tests.ops import entries
from tests.ops.operator_entry import Operator

OPERATORS: tuple[Operator, ...] = tuple(
    import_module(f"{entries.__name__}.{module.name}").OPERATOR
    for module in iter_modules(entries.__path__)
)

each_operator = pytest.mark.parametrize("op", OPERATORS, ids=str)
each_case = pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op} {case}") for op in OPERATORS for case in op.cases],
)
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
