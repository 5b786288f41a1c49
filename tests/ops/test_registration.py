"""Declarations that do not match the operator's schema raise at registration."""

import re

import pytest
import torch

from ops.core.formula import Formula
from ops.core.registration import register
from ops.core.rules import elementwise, linear
from tests.ops.operator_entry import raw

GELU, POOL = raw.gelu.default, raw.max_pool2d.default
PARTS = elementwise(GELU, "gelu_backward(grad, input)")


def assert_raises(says, **parts):
    with pytest.raises(TypeError, match=re.escape(says)):
        register(GELU, **{**PARTS, **parts})


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("gelu_backward(grad, output, input)", "has 3 arguments, the operator takes 2"),
        ("gelu_backward(grad)", "has 1 arguments"),
        ("gelu_backward(grad, x)", "x is no gradient, argument or output of lenet_ops::gelu"),
        ("gelu_backward(grad, input.height)", "passes int for input, which is Tensor"),
        ("gelu_backward(input, input)", "must take the gradients of one or several leading"),
        ("gelu_backward(grads[1], input)", "must take the gradients of one or several leading"),
        ("gelu_gradient(grad, input)", "is not a call of an operator of lenet_ops"),
        ("gelu_backward", "is not a call of an operator of lenet_ops"),
        ("max_pool2d(grad, input, input, input, input, input)", "which is List[int]"),
    ],
)
def test_wrong_formula(formula, says):
    assert_raises(says, backward=formula)


def test_formula_with_too_few_gradients():
    with pytest.raises(TypeError, match="returns 1 gradients for 3 tensor arguments"):
        Formula(raw.depthwise_conv2d.default, "exp_backward(grad, output)")


@pytest.mark.parametrize("part", ["fake", "vmap", "jvp", "backward", "flops"])
def test_function_with_wrong_arguments(part):
    assert_raises(f"gelu: {part} must take", **{part: lambda: None})


def test_unknown_saved_tensor():
    assert_raises("saves=output: no tensor argument", backward=lambda a, b, c: (), saves=["output"])
    assert_raises("the gradient formula says what is saved", saves=["input"])


def test_autograd_variant_with_other_arguments():
    variant = raw.ncrelu_with_signs.default
    assert_raises("autograd_variant=ncrelu_with_signs takes other", autograd_variant=variant)


def test_elementwise_with_too_few_derivatives():
    with pytest.raises(TypeError, match="needs a derivative for each of grad_output, input"):
        elementwise(raw.gelu_backward.default, [torch.mul])


def test_formula_lists_saved_tensors_and_constants():
    formula = Formula(
        POOL,
        "max_pool2d_backward(grads[0], indices, kernel_size, stride, padding, dilation, "
        "ceil_mode, input.height, input.width, input.channels_last)",
    )
    inputs = (torch.ones(1, 2, 3, 5), [2, 2], [2, 2], [0, 0], [1, 1], False)
    outputs = torch.ones(1), torch.zeros(1)
    assert formula.saved(inputs, outputs) == [outputs[1]]
    assert formula.constants(inputs) == [*inputs[1:], 3, 5, False]
    assert formula.grads == 1


def test_linear_operator_ignores_tangents_of_constants():
    parts = linear(raw.ncrelu_with_signs_backward.default, lambda *_: None, saves=["signs"])
    outputs = (torch.ones(2),)
    assert not parts["jvp"]((None,), outputs, (None, torch.ones(2), None, None)).any()
