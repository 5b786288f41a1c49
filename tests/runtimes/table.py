"""Measure the tables of docs/runtimes.md: python -m tests.runtimes.table [NETWORK...]."""

import os
import sys
import tempfile
from pathlib import Path

from tests.networks import KINDS
from tests.runtimes.networks import LAYOUTS, accuracy, prepare
from tests.runtimes.runtimes import LAYOUTS as RUNTIMES
from tests.runtimes.runtimes import MissingError, run, version_of

TURNS = 5


def main(*kinds):
    folder = Path(os.environ.get("TRAINED_NETWORKS") or tempfile.mkdtemp())
    print(f"| network | layout | bytes | {' | '.join(RUNTIMES)} |")
    print("| --- " * (3 + len(RUNTIMES)) + "|")
    largest, lost = dict.fromkeys(RUNTIMES, 0.0), dict.fromkeys(RUNTIMES, 0.0)
    differing = dict.fromkeys(RUNTIMES, 0)
    for kind in kinds or KINDS:
        for layout in LAYOUTS:
            case = prepare(folder, kind, layout)
            cells = []
            for runtime, layouts in RUNTIMES.items():
                if layout not in layouts:
                    cells.append("–")
                    continue
                try:
                    logits, microseconds = run(runtime, case.path, case.images, folder, TURNS)
                except MissingError as error:
                    sys.exit(str(error))
                except Exception as error:
                    cells.append(" ".join(str(error).split())[:60])
                    continue
                cells.append(f"{microseconds:,.0f}")
                if layout == "int8":
                    loss = case.accuracy - accuracy(logits, case.labels)
                    lost[runtime] = max(lost[runtime], loss)
                else:
                    largest[runtime] = max(largest[runtime], abs(logits - case.logits).max())
                    differing[runtime] += int((logits.argmax(1) != case.logits.argmax(1)).sum())
            row = [kind, layout, f"{case.path.stat().st_size:,}", *cells]
            print(f"| {' | '.join(row)} |", flush=True)
    heads = ["runtime", "version", "layouts", "largest difference of a logit"]
    heads += ["differing predictions", "accuracy lost by int8"]
    print(f"\n| {' | '.join(heads)} |\n" + "| --- " * 6 + "|")
    for runtime, layouts in RUNTIMES.items():
        int8 = f"{100 * lost[runtime]:.1f} points" if "int8" in layouts else "–"
        cells = [runtime, version_of(runtime), ", ".join(layouts), f"{largest[runtime]:.2g}"]
        print(f"| {' | '.join([*cells, str(differing[runtime]), int8])} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
