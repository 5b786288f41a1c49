"""Export trained networks by every exporter, layout and opset; compare each file with PyTorch.

    python scripts/check_export.py outputs/2026-01-31/12-00-00-1234abcd ... [--opset 17 18]

The opsets are those that the installed onnx and ONNX Runtime support. Each file passes onnx's full
check and strict shape inference, and predicts the test split of the network's data set. The exit
code is 1 if an export fails, a prediction differs or a logit differs by more than 1e-5.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout

from app.config.schema import ExportConfig
from app.data.datasets import load_test_split
from app.export.export import check
from app.export.graph import build_graph, newest_opset
from app.export.parity import compare
from app.inference.onnx_runtime import onnx_predictor, open_session
from app.inference.predictor import load_torch
from app.models import describe_model
from ops.export import LEAST_OPSET

TOLERANCE = 1e-5  # largest difference of the logits


def main() -> int:
    """Run the checks, print the results and return the exit code."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=text[0], epilog=text[2])
    opsets = list(range(LEAST_OPSET, newest_opset() + 1))
    add = parser.add_argument
    add("checkpoint", nargs="+", help="checkpoints or run folders")
    add("--exporter", nargs="+", choices=["symbolic", "dynamo"], default=["symbolic", "dynamo"])
    add("--layout", nargs="+", choices=["function", "standard"], default=["function", "standard"])
    add("--opset", nargs="+", type=int, choices=opsets, default=opsets)
    add("--data-root", default="data", help="where data sets are (default: data)")
    args = parser.parse_args()
    failed = files = 0
    for checkpoint in args.checkpoint:
        original = load_torch(checkpoint)
        split = load_test_split(original.data.name, args.data_root)
        kind = describe_model(original.config)
        for exporter, layout, opset in product(args.exporter, args.layout, args.opset):
            cfg = ExportConfig(exporter=exporter, layout=layout, opset=opset)
            name = f"{kind} {exporter:8} {layout:8} opset {opset}"
            try:
                model = check(build_graph(original, cfg))
                exported = onnx_predictor(open_session(model.SerializeToString()), original.folder)
                parity = compare(exported, original, split)
                wrong = parity.differing > 0 or not parity.max_abs_difference <= TOLERANCE
                print(f"{name}: {parity}{'  WRONG' if wrong else ''}", flush=True)
            except Exception as error:  # reported as a result
                wrong = True
                print(f"{name}: {' '.join(str(error).split())}  FAILED", flush=True)
            failed, files = failed + wrong, files + 1
    print(f"{files - failed} of {files} exports passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
