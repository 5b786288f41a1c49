"""No cliff on the CPU: a benchmark case of each operator beside its composition, in turns."""

import math
import sys
import time

import pytest
import torch

from tests.networks import ROOT

sys.path.append(str(ROOT / "scripts"))
from bench.cases import DTYPES, cases, pass_call

SLOWEST = 2.5  # times the composition: a loop that is not vectorised takes 5 to 20 times as long
LARGE = [case for case in cases("cpu") if math.prod(case.shape) > 100_000]  # more than overhead
CASES = {case.op: case for case in sorted(LARGE, key=lambda case: -math.prod(case.shape))}


def thread_time(call):
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_passes_are_as_fast_as_the_composition(name, dtype, one_thread):
    case = CASES[name]
    inputs = case.inputs("cpu", DTYPES[dtype])
    grad = torch.randn(case.composition()(*inputs).shape).to(DTYPES[dtype])
    for what in case.passes:
        ours, peer = (
            pass_call(what, function, inputs, grad)
            for function in (case.function(), case.composition())
        )
        times = [(thread_time(ours), thread_time(peer)) for _ in range(4)]
        mine, theirs = map(min, zip(*times, strict=True))
        assert mine < SLOWEST * theirs, f"{case.label} {what}: {mine / theirs:.1f} times"
