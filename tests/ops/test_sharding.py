"""DTensor: two processes compute what one computes, for every placement of the first argument."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from ops import batch_norm_act2d
from tests.ops.operators import OPERATORS
from tests.ops.tensors import inputs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def test_two_processes_match_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.ops.test_sharding"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(OPERATORS)} operators" in done.stdout


def compare(op, case, placement, of_grad):
    """Compare outputs and gradients of a call on DTensors with those on plain tensors."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    plain = inputs(case, torch.float64, requires_grad=True)
    placements = [placement, *[Replicate()] * (len(plain) - 1)]
    sharded = [
        distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
        for x, p in zip(plain, placements, strict=True)
    ]
    results = []
    for tensors in (plain, sharded):
        outputs = op.function(*tensors, **case.kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(0)
        grads = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
        if tensors is sharded:
            grads = [distribute_tensor(grad, mesh, [of_grad]) for grad in grads]
        torch.autograd.backward(outputs, grads)
        results.append([*outputs, *(x.grad for x in tensors)])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result.full_tensor(), expected)


def check_running_statistics():
    """Expect partial sums as running statistics to raise: they are updated in place."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(3, 4, 5, 6), mesh, [Replicate()])
    mean, var = (DTensor.from_local(torch.zeros(4), mesh, [Partial()]) for _ in range(2))
    with pytest.raises(RuntimeError, match="running_mean and running_var must be replicated"):
        batch_norm_act2d(x, mean, var, training=True)


def main():
    """Compare all operators in one of the processes."""
    from torch.distributed.tensor import Replicate, Shard

    dist.init_process_group("gloo")
    for op in OPERATORS:
        case = op.cases[0]
        placements = [Replicate(), *map(Shard, range(len(case.shapes[0])))]
        for placement in placements:
            for of_grad in (Replicate(), Shard(0)):
                compare(op, case, placement, of_grad)
    check_running_statistics()
    print(len(OPERATORS), "operators")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
