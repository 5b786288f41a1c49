"""Logits of every network in every runtime, against torch."""

import numpy as np
import pytest

from tests.networks import KINDS, common_folder
from tests.runtimes.networks import accuracy, prepare
from tests.runtimes.runtimes import LAYOUTS, REFUSED, MissingError, run

TOLERANCE = 1e-4  # largest difference of the logits
# Largest loss of accuracy in int8 on the first 1,000 images; the export allows 0.002 on all 10,000.
LOSABLE = 0.005
IMAGES = {"onnx reference evaluator": 100}  # slow; all images in the others
IN_CI = ("ncrelu-standard", "separable", "involution", "lltm")  # every layer of the other networks
each_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in IN_CI else [pytest.mark.exhaustive]) for kind in KINDS],
)
FLOAT = [(runtime, layout) for runtime in LAYOUTS for layout in ("function", "standard")]


@pytest.fixture
def run_runtime(tmp_path_factory, tmp_path):
    def run_case(runtime, kind, layout):
        case = prepare(common_folder(tmp_path_factory), kind, layout)
        try:
            images = case.images[: IMAGES.get(runtime)]
            return case, run(runtime, case.path, images, tmp_path)[0]
        except MissingError as error:
            pytest.skip(str(error))

    return run_case


@each_kind
@pytest.mark.parametrize(
    ("runtime", "layout"), [(r, layout) for r, layout in FLOAT if layout in LAYOUTS[r]]
)
def test_logits_match_torch(run_runtime, runtime, layout, kind):
    if (runtime, kind) in REFUSED:
        with pytest.raises(RuntimeError, match="refuses"):
            run_runtime(runtime, kind, layout)
        return
    case, logits = run_runtime(runtime, kind, layout)
    assert len(logits) == IMAGES.get(runtime, 1000)
    expected = case.logits[: len(logits)]
    assert (logits.argmax(1) != expected.argmax(1)).sum() == 0
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "separable" else [pytest.mark.exhaustive])
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("runtime", [r for r in LAYOUTS if "int8" in LAYOUTS[r]])
def test_int8_keeps_the_accuracy(run_runtime, runtime, kind):
    case, logits = run_runtime(runtime, kind, "int8")
    assert accuracy(logits, case.labels) >= case.accuracy - LOSABLE


@pytest.mark.parametrize("runtime", [r for r in LAYOUTS if "function" not in LAYOUTS[r]])
def test_runtime_without_functions_raises(run_runtime, runtime):
    """If this fails, the runtime supports functions: update LAYOUTS and docs/runtimes.md."""
    with pytest.raises(Exception, match=r"NCReLU|MaxPool2d"):
        run_runtime(runtime, "ncrelu-standard", "function")
