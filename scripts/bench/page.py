"""Tables of docs/benchmarks.md and README.md."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

OURS = "ours"
WORST = 3  # rows that `below_one` names for each operator
FUNCTIONS = {
    "batch_norm": "batch_norm_act2d",
    "depthwise": "depthwise_conv2d",
    "depthwise1d": "depthwise_conv1d",
    "involution": "involution2d",
    "max_pool": "max_pool2d",
    "pool": "global_avg_pool2d",
}
FORMULAS = {
    "batch_norm_act2d": "batch normalisation, then the activation",
    "depthwise_conv1d": "convolution of sequences, one filter per channel, then SiLU",
    "depthwise_conv2d": "convolution, one filter per channel",
    "exp": "eˣ",
    "gelu": "x · σ(1.702 x)",
    "global_avg_pool2d": "mean of each channel",
    "involution2d": "convolution, one filter per pixel",
    "lltm": "recurrent layer",
    "lltm_cell": "one step of `lltm`",
    "max_pool2d": "maximum of each window",
    "ncrelu": "max(x, 0), min(x, 0) side by side",
}


@dataclass(frozen=True)
class Result:
    """Our result for one pass, shape, dtype and layout, compared with the fastest peer.

    Attributes:
        fraction: roofline bound / our time.
        speedup: fastest peer's time / our time.
        graph_speedup: the same inside CUDA graphs, None where not measured.
    """

    op: str
    device: str
    dtype: str
    format: str
    shape: str
    what: str
    fraction: float
    speedup: float
    graph_speedup: float | None

    @property
    def best_speedup(self) -> float:
        """Return the speed-up in a CUDA graph, or of a call where that was not measured."""
        return self.graph_speedup or self.speedup

    @property
    def place(self) -> str:
        """Return shape and pass."""
        return f"{self.shape} {self.what}"


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Read our rows that have a peer from files written by `report.write_csv`."""
    results = []
    for path in paths:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                if line["implementation"] == OURS and line["speedup_over_best_peer"]:
                    graph = line["graph_speedup_over_best_peer"]
                    results.append(
                        Result(
                            op=line["op"],
                            device=line["device"],
                            dtype=line["dtype"],
                            format=line["format"],
                            shape=line["shape"],
                            what=line["pass"],
                            fraction=float(line["fraction_of_floor"]),
                            speedup=float(line["speedup_over_best_peer"]),
                            graph_speedup=float(graph) if graph else None,
                        )
                    )
    return results


def group(results: Iterable[Result], *names: str) -> dict[tuple[str, ...], list[Result]]:
    """Group by the named attributes, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result, n) for n in names), []).append(result)
    return groups


def in_graph(results: Iterable[Result]) -> list[tuple[float, Result]]:
    """Return the results measured in CUDA graphs, the lowest ratio first."""
    pairs = [(r.graph_speedup, r) for r in results if r.graph_speedup is not None]
    return sorted(pairs, key=lambda pair: pair[0])


def speed_table(results: Sequence[Result]) -> str:
    """Return a table of each operator's forward+backward ratio: geometric mean (least)."""
    both = [r for r in results if r.what == "forward+backward"]
    devices = list(dict.fromkeys(r.device for r in both))
    named = {FUNCTIONS.get(op, op): rows for (op,), rows in group(both, "op").items()}
    lines = [
        f"| operator | computes | {' | '.join(devices)} |",
        "|---|---|" + "---|" * len(devices),
    ]
    for name, rows in sorted(named.items()):
        cells = [f"`{name}`", FORMULAS.get(name, "")]
        for device in devices:
            ratios = [r.best_speedup for r in rows if r.device == device]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(results: Sequence[Result]) -> str:
    """Return a table with a row for each operator, device, dtype and layout."""
    lines = [
        "| operator | device | dtype | layout | rows | share of floor | ratio | worst row "
        "| ratio in CUDA graph, worst row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, rows in group(results, "op", "device", "dtype", "format").items():
        shares = sorted(row.fraction for row in rows)
        worst = min(rows, key=lambda row: row.speedup)
        graph = ""
        if pairs := in_graph(rows):
            ratio, row = pairs[0]
            graph = f"{geometric_mean(g for g, _ in pairs):.2f}, {ratio:.2f}: {row.place}"
        cells = [
            *key,
            str(len(rows)),
            f"{median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
            f"{geometric_mean(row.speedup for row in rows):.2f}",
            f"{worst.speedup:.2f}: {worst.place}",
            graph,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def below_one(results: Sequence[Result]) -> str:
    """Return a table of the operators and devices that have rows below 1, with the worst rows."""
    lines = [
        "| operator | device | rows below 1 | worst | in CUDA graph, rows below 1 | worst |",
        "|---|---|---|---|---|---|",
    ]

    def worst(pairs: Sequence[tuple[float, Result]]) -> str:
        return "; ".join(
            f"{ratio:.2f}: {r.place} {r.dtype} {r.format}" for ratio, r in pairs[:WORST]
        )

    for key, rows in group(results, "op", "device").items():
        calls = sorted(((r.speedup, r) for r in rows), key=lambda pair: pair[0])
        graphs = in_graph(rows)
        slow_calls = [pair for pair in calls if pair[0] < 1]
        slow_graphs = [pair for pair in graphs if pair[0] < 1]
        if slow_calls or slow_graphs:
            cells = [*key, f"{len(slow_calls)} of {len(calls)}", worst(slow_calls)]
            cells += [f"{len(slow_graphs)} of {len(graphs)}" if graphs else "", worst(slow_graphs)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_below_one(path: Path, results: Iterable[Result]) -> None:
    """Write the rows with a ratio below 1, eager or in a CUDA graph, as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["op", "device", "dtype", "format", "shape", "pass", "ratio", "ratio_in_cuda_graph"]
        )
        for r in results:
            if min(r.speedup, r.graph_speedup or r.speedup) < 1:
                graph = "" if r.graph_speedup is None else f"{r.graph_speedup:.2f}"
                ratio = f"{r.speedup:.2f}"
                writer.writerow([r.op, r.device, r.dtype, r.format, r.shape, r.what, ratio, graph])
