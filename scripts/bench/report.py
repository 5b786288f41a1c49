"""Reports of measurements: text, CSV and a plot."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from bench.page import OURS
from bench.recurrent import LSTM

COLUMNS = (
    "device",
    "torch",
    "op",
    "shape",
    "dtype",
    "format",
    "pass",
    "implementation",
    "ms",
    "floor_ms",
    "fraction_of_floor",
    "speedup_over_best_peer",
    "graph_ms",
    "graph_speedup_over_best_peer",
)
NAME = "op", "shape", "dtype", "format", "what"


@dataclass
class Row:
    """Times of every implementation for one pass, shape, dtype and memory format.

    Attributes:
        what: the pass.
        floor_ms: roofline bound, see `Case.floor_ms`.
        ms: median milliseconds by implementation.
        graph_ms: the same inside a CUDA graph; empty if not measured.
    """

    op: str
    shape: str
    dtype: str
    format: str
    what: str
    floor_ms: float
    ms: dict[str, float] = field(default_factory=dict)
    graph_ms: dict[str, float] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """Return roofline bound / our time; 1 is optimal."""
        return self.floor_ms / self.ms[OURS]

    def best_peer(self) -> tuple[str, float]:
        """Return the fastest peer in this memory format and its milliseconds."""
        peers = {name: ms for name, ms in self.ms.items() if name not in (OURS, LSTM)}
        return min(peers.items(), key=lambda item: item[1], default=("none", math.nan))

    @property
    def speedup(self) -> float:
        """Return fastest peer's time / our time."""
        return self.best_peer()[1] / self.ms[OURS]

    def best_graph_ms(self) -> float:
        """Return the fastest peer's milliseconds inside a CUDA graph, NaN if not measured."""
        peers = [ms for name, ms in self.graph_ms.items() if name not in (OURS, LSTM)]
        return min(peers, default=math.nan)

    @property
    def graph_speedup(self) -> float:
        """Return the speedup inside a CUDA graph, NaN if not measured."""
        return self.best_graph_ms() / self.graph_ms.get(OURS, math.nan)

    def line(self) -> str:
        """Return the row as text, below `HEADER`."""
        peer, peer_ms = self.best_peer()
        text = (
            f"{self.op:9} {self.shape:22} {self.dtype:8} {self.format} {self.what:16} "
            f"{self.ms[OURS]:9.4f} ms {self.floor_ms:9.4f} {self.fraction:5.2f}  "
            f"{peer_ms:9.4f} {peer:13} {self.speedup:6.2f}x"
        )
        if LSTM in self.ms:
            text += f"   {LSTM} {self.ms[LSTM]:.4f} ms"
        if not math.isnan(self.graph_speedup):
            text += f"   {self.graph_ms[OURS]:8.4f} ms {self.graph_speedup:6.2f}x"
        return text


HEADER = (
    f"{'operator':9} {'shape':22} {'dtype':8} fmt. {'pass':16} {'ours':>12} {'floor':>9} "
    f"{'of it':>5}  {'best peer':>9} {'':13} {'faster':>7}   in a CUDA graph"
)


def summary(rows: Sequence[Row]) -> str:
    """Return speed-ups and fractions of the roofline bound by operator and pass.

    Rows without a peer are left out.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if not math.isnan(row.speedup):
            groups[row.op, row.what].append(row)
    lines = [
        f"{'operator':9} {'pass':16} {'rows':>4}   speed-up over the best peer: "
        f"mean (geometric), least   either format   fraction of the floor"
    ]
    for (op, what), group in groups.items():
        least = min(group, key=lambda row: row.speedup)
        lines.append(
            f"{op:9} {what:16} {len(group):4}   {geometric_mean(r.speedup for r in group):6.2f}x "
            f"{least.speedup:6.2f}x ({least.shape} {least.dtype} {least.format})   "
            f"{either_format(group):6.2f}x least   "
            f"{geometric_mean(r.fraction for r in group):5.2f}"
        )
    return "\n".join(lines)


def either_format(rows: Sequence[Row]) -> float:
    """Return the least speed-up if each side takes its faster memory format."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.shape, row.dtype].append(row)
    return min(
        min(r.best_peer()[1] for r in group) / min(r.ms[OURS] for r in group)
        for group in groups.values()
    )


def write_csv(path: Path, rows: Iterable[Row], device: str, torch_version: str) -> None:
    """Write a line for each row and implementation."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            for name, ms in row.ms.items():
                graph = row.graph_ms.get(name)
                ratios = (row.best_peer()[1] / ms, row.best_graph_ms() / (graph or math.nan))
                speedup, graph_speedup = ("" if math.isnan(r) else f"{r:.4g}" for r in ratios)
                writer.writerow(
                    [device, torch_version, *(getattr(row, n) for n in NAME), name]
                    + [f"{v:.5g}" for v in (ms, row.floor_ms, row.floor_ms / ms)]
                    + [speedup, "" if graph is None else f"{graph:.5g}", graph_speedup]
                )


def read_csv(path: Path) -> tuple[list[Row], str, str]:
    """Read a file of `write_csv`; return rows, device and torch version."""
    rows: dict[tuple[str, ...], Row] = {}
    device = version = ""
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            device, version = line["device"], line["torch"]
            key = tuple(line[n if n != "what" else "pass"] for n in NAME)
            row = rows.setdefault(key, Row(*key, floor_ms=float(line["floor_ms"])))
            row.ms[line["implementation"]] = float(line["ms"])
            if line["graph_ms"]:
                row.graph_ms[line["implementation"]] = float(line["graph_ms"])
    return list(rows.values()), device, version


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot time / roofline bound of each implementation, a panel for each operator and pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    dtype = rows[0].dtype
    rows = [row for row in rows if row.dtype == dtype and row.what != "forward+backward"]
    panels = list(dict.fromkeys((row.op, row.what) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    deepest = max(sum((r.op, r.what) == panel for r in rows) for panel in panels)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4.6 * columns, lines * (1.2 + 0.2 * deepest)),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        chosen = [row for row in rows if (row.op, row.what) == panel]
        for name in names:
            at = [i for i, row in enumerate(chosen) if name in row.ms]
            axis.plot(
                [chosen[i].ms[name] / chosen[i].floor_ms for i in at],
                at,
                "o" if name == OURS else "|",
                color=colours[name],
                markersize=6 if name == OURS else 9,
                markeredgewidth=2,
                label=name,
                zorder=3 if name == OURS else 2,
            )
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_yticks(range(len(chosen)), [f"{r.shape} {r.format}" for r in chosen], fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel("time / floor", fontsize=8)
        axis.set_title(f"{panel[0]} {panel[1]}", fontsize=9)
        axis.grid(axis="x", which="both", alpha=0.2)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(names))
    figure.suptitle(f"{title}, {dtype}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
