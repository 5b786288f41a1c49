"""Declarations that do not match the operator's schema raise at registration."""

import re

import pytest
import torch

from ops.core.gradient import make_gradient
from ops.core.registration import register
from tests.ops.operator_entry import raw

GELU, POOL = raw.gelu.default, raw.max_pool2d_with_indices.default
LIBRARY = torch.library.Library("ops_test", "DEF")


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        (
            "a",
            "(Tensor grad_output, Tensor x) -> Tensor",
            "x: Tensor is neither in lenet_ops",
        ),
        ("b", "(Tensor grad_output, int input) -> Tensor", "input: int is neither in lenet_ops"),
        ("c", "(int grad_output, Tensor input) -> Tensor", "grad_output: int is neither"),
        (
            "d",
            "(Tensor input) -> Tensor",
            "0 gradients of 1 outputs, 1 outputs for 1 tensor arguments",
        ),
        ("e", "(Tensor grad_output, Tensor grad_other) -> Tensor", "2 gradients of 1 outputs"),
        (
            "f",
            "(Tensor grad_output) -> (Tensor, Tensor)",
            "1 gradients of 1 outputs, 2 outputs for 1 tensor arguments",
        ),
    ],
)
def test_wrong_backward_operator(name, schema, says):
    LIBRARY.define(name + schema)
    backward = getattr(torch.ops.ops_test, name).default
    with pytest.raises(TypeError, match=re.escape(f"gelu: gradient {name}: {says}")):
        make_gradient(GELU, backward)


def test_operator_without_derivatives():
    with pytest.raises(TypeError, match="gelu: neither backward nor autograd_variant"):
        register(GELU, fake=torch.empty_like, vmap=torch.vmap, sharding=[])


def test_values_of_a_backward_operator():
    gradient = make_gradient(POOL, raw.max_pool2d_with_indices_backward.default)
    inputs = (torch.ones(1, 2, 3, 5), [2, 2], [2, 2], [0, 0], [1, 1], False)
    outputs = torch.ones(1), torch.zeros(1)
    assert gradient.values(inputs, outputs) == [None, outputs[1], *inputs[1:], 3, 5, False]
    assert gradient.grads == 1
