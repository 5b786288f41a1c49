"""Update the tables of docs/benchmarks.md and README.md from docs/benchmarks/operators-*.csv.

    python scripts/bench_page.py [--check]

Writes the tables between the pages' markers, and docs/benchmarks/below-1.csv. Run it after a
change to the CSV files, which come from `scripts/bench_ops.py --csv`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.page import below_one, headline, read_results, speed_table, write_below_one

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
TABLES = {
    ROOT / "docs" / "benchmarks.md": {"headline": headline, "below-1": below_one},
    ROOT / "README.md": {"speed": speed_table},
}
END = "<!-- end -->"


def fill(text: str, tables: dict[str, str]) -> str:
    """Return `text` with each table inserted between its markers."""
    for name, table in tables.items():
        start = f"<!-- {name} -->\n"
        if text.count(start) != 1:
            raise ValueError(f"the page needs one place marked {start.strip()}")
        before, after = text.split(start)
        text = f"{before}{start}\n{table}\n\n{after[after.index(END) :]}"
    return text


def main(argv: list[str] | None = None) -> int:
    """Update the pages; with --check, return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    results = read_results(sorted(BENCHMARKS.glob("operators-*.csv")))
    outdated = False
    for page, tables in TABLES.items():
        old = page.read_text()
        new = fill(old, {name: table(results) for name, table in tables.items()})
        if not args.check:
            page.write_text(new)
        elif old != new:
            print(f"error: run scripts/bench_page.py: {page.name} differs", file=sys.stderr)
            outdated = True
    if not args.check:
        write_below_one(BENCHMARKS / "below-1.csv", results)
    return int(outdated)


if __name__ == "__main__":
    sys.exit(main())
