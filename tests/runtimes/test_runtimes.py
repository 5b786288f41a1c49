"""Every runtime gives the answers of torch for every network."""

import numpy as np
import pytest

from tests.networks import common_folder
from tests.runtimes.networks import KINDS, accuracy, prepare
from tests.runtimes.runtimes import LAYOUTS, MissingError, run

TOLERANCE = 1e-4  # of a logit
LOSABLE = 0.002  # of accuracy, in int8
REFUSED = {("OpenVINO", "lltm"), ("tract", "lltm")}  # they have no Scan, or another's
FLOAT = [(runtime, layout) for runtime in LAYOUTS for layout in ("function", "standard")]


@pytest.fixture
def answer(tmp_path_factory, tmp_path):
    def run_case(runtime, kind, layout):
        case = prepare(common_folder(tmp_path_factory), kind, layout)
        try:
            return case, run(runtime, case.path, case.images, tmp_path)[0]
        except MissingError as error:
            pytest.skip(str(error))

    return run_case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("runtime", "layout"), [(r, layout) for r, layout in FLOAT if layout in LAYOUTS[r]]
)
def test_predictions_and_logits_are_those_of_torch(answer, runtime, layout, kind):
    if (runtime, kind) in REFUSED:
        with pytest.raises(Exception, match=r"Scan"):
            answer(runtime, kind, layout)
        return
    case, logits = answer(runtime, kind, layout)
    assert len(logits) >= 1000
    assert (logits.argmax(1) != case.logits.argmax(1)).sum() == 0
    np.testing.assert_allclose(logits, case.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [(r, k) for r in LAYOUTS if "int8" in LAYOUTS[r] for k in KINDS if (r, k) not in REFUSED],
)
def test_int8_keeps_the_accuracy(answer, runtime, kind):
    case, logits = answer(runtime, kind, "int8")
    assert accuracy(logits, case.labels) >= case.accuracy - LOSABLE


@pytest.mark.parametrize("runtime", [r for r in LAYOUTS if "function" not in LAYOUTS[r]])
def test_functions_are_refused_as_the_docs_say(answer, runtime):
    """Where this fails, the runtime has learned functions: a new row for docs/runtimes.md."""
    with pytest.raises(Exception, match=r"NCReLU|MaxPool2d"):
        answer(runtime, "ncrelu-standard", "function")
