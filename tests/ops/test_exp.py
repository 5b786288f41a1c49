"""exp at the ends of its range, by relative error."""

import pytest
import torch

from ops import exp
from tests.ops.operators import each_device


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_subnormal_zero_and_infinite_results(dtype, device):
    least = -746.0 if dtype == torch.float64 else -104.0
    x = torch.linspace(least, least / 1.2, 1001, dtype=torch.float64).to(dtype)
    x = torch.cat((x, torch.tensor([-torch.inf, -1e30, torch.inf, 1e30, 0.0]).to(dtype)))
    actual = exp(x.to(device)).cpu().double()
    expected = x.double().exp().to(dtype).double()
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps  # the smallest subnormal
    torch.testing.assert_close(actual, expected, rtol=4 * info.eps, atol=2 * smallest)
    assert (actual[-5:] == expected[-5:]).all()
