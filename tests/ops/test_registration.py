"""Declarations that do not match the operator's schema raise at registration."""

import re

import pytest
import torch

from ops.core.gradient import OperatorGradient
from ops.core.registration import register
from ops.core.rules import elementwise, linear
from tests.ops.operator_entry import raw

GELU, POOL = raw.gelu.default, raw.max_pool2d.default
LIBRARY = torch.library.Library("ops_test", "DEF")
PARTS = elementwise(GELU, raw.gelu_backward.default)


def assert_raises(says, **parts):
    with pytest.raises(TypeError, match=re.escape(says)):
        register(GELU, **{**PARTS, **parts})


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        (
            "a",
            "(Tensor grad_output, Tensor x) -> Tensor",
            "x is no argument or output of lenet_ops",
        ),
        ("b", "(Tensor grad_output, int input) -> Tensor", "input is int, but Tensor in lenet_ops"),
        ("c", "(int grad_output, Tensor input) -> Tensor", "grad_output is int, but Tensor"),
        ("d", "(Tensor input) -> Tensor", "0 gradients of 1 outputs"),
        ("e", "(Tensor grad_output, Tensor grad_other) -> Tensor", "2 gradients of 1 outputs"),
        ("f", "(Tensor grad_output) -> (Tensor, Tensor)", "2 outputs for 1 tensor arguments"),
    ],
)
def test_wrong_backward_operator(name, schema, says):
    LIBRARY.define(name + schema)
    backward = getattr(torch.ops.ops_test, name).default
    assert_raises(f"gelu: gradient {name}: {says}", backward=backward)


@pytest.mark.parametrize("part", ["fake", "vmap", "jvp", "backward", "flops"])
def test_function_with_wrong_arguments(part):
    assert_raises(f"gelu: {part} must take", **{part: lambda: None})


def test_autograd_variant_with_other_arguments():
    variant = raw.ncrelu_with_signs.default
    assert_raises("autograd_variant=ncrelu_with_signs takes other", autograd_variant=variant)


def test_values_of_a_backward_operator():
    gradient = OperatorGradient(POOL, raw.max_pool2d_backward.default)
    inputs = (torch.ones(1, 2, 3, 5), [2, 2], [2, 2], [0, 0], [1, 1], False)
    outputs = torch.ones(1), torch.zeros(1)
    assert gradient.values(inputs, outputs) == [None, outputs[1], *inputs[1:], 3, 5, False]
    assert gradient.grads == 1


def test_linear_operator_ignores_tangents_of_constants():
    parts = linear(raw.ncrelu_with_signs_backward.default, lambda *_: None)
    outputs = (torch.ones(2),)
    assert not parts["jvp"]((None,), outputs, (None, torch.ones(2), None, None)).any()
