"""Runs side by side: a table over seeds, a line a run as CSV, and a plot."""

import csv
import io
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.errors import UserError
from app.config.schema import shown
from app.runs.files import print_and_write
from app.runs.folder import (
    FREE,
    RESULTS,
    find_runs,
    flatten,
    idle,
    newest,
    read_settings,
    read_summary,
)

APART = ("seed", *FREE)  # do not make another kind of run


@dataclass
class Entry:
    """One run: its folder, its settings by dotted key, and its `summary.json`."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]

    def setting(self, key: str) -> str:
        """A setting as it is typed; "" for what its network has no choice of."""
        return "" if key in idle(self.settings) else shown(self.settings.get(key))

    def label(self, key: str) -> str:
        """A setting to read: numbers to four digits."""
        value = self.settings.get(key)
        return f"{value:.4g}" if isinstance(value, float) else self.setting(key)

    @property
    def status(self) -> str:
        """`finished`, `failed`, `interrupted`, or `unfinished`: it runs, or it was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def finished(self) -> bool:
        """Whether it has results."""
        return self.status == "finished"


@dataclass
class Group:
    """Runs that differ in nothing but the seed, named by the settings in which groups differ."""

    name: str
    entries: list[Entry]

    @property
    def finished(self) -> list[Entry]:
        """The runs that have results."""
        return [entry for entry in self.entries if entry.finished]

    @property
    def status(self) -> str:
        """What has become of the runs, in words."""
        return " or ".join(sorted({entry.status for entry in self.entries}))

    def values(self, measure: str) -> list[float]:
        """A measure of each of the finished runs."""
        return [float(entry.summary[measure]) for entry in self.finished]

    def percent(self, measure: str) -> list[float]:
        """A share of each of the finished runs, in per cent."""
        return [100 * value for value in self.values(measure)]


def report(folder: str, outputs: str = "outputs") -> None:
    """Print the table of the runs under `folder`, and leave `report.csv` and `report.png` in it.

    Args:
        folder: Holds run folders at any depth, or is one; `latest`: the newest sweep or run.
        outputs: Where `latest` looks.

    Raises:
        UserError: There are no runs, or one of them cannot be read.
        RunError: The files cannot be written.
    """
    root = _newest(Path(outputs)) if folder == "latest" else Path(folder).expanduser()
    entries = find_entries(root)
    if not entries:
        raise UserError(f"{root}: {'no runs in it' if root.is_dir() else 'no such folder'}")
    groups = group(entries)
    count = f"{len(entries)} run{'s' if len(entries) > 1 else ''}"
    text = f"{root}: {count}\n\n{format_table(groups)}"
    for entry in entries:
        if not entry.finished:
            reason = entry.summary.get("error", "")
            text += f"{entry.status}: {entry.folder}" + (f": {reason}" if reason else "") + "\n"
    files = {"report.csv": to_csv(entries).encode(), "report.png": plot(groups)}
    print_and_write(f"{text}\n", root, files, sys.stdout)


def find_entries(root: Path) -> list[Entry]:
    """The runs at any depth under `root`, in the order of their folders' names."""
    return [
        Entry(path, flatten(read_settings(path)), read_summary(path))
        for path in sorted(find_runs(root), key=_natural)
    ]


def group(entries: Sequence[Entry]) -> list[Group]:
    """Put together the runs that differ in nothing but the seed; in the order of first sight."""
    keys = _varied(entries)
    groups: dict[tuple[str, ...], Group] = {}
    for entry in entries:
        labels = [f"{key}={entry.label(key)}" for key in keys if entry.setting(key)]
        kind = tuple(entry.setting(key) for key in keys)
        groups.setdefault(kind, Group(" ".join(labels) or "all", [])).entries.append(entry)
    return list(groups.values())


def format_table(groups: Sequence[Group]) -> str:
    """A line a group: mean ± standard deviation over its finished runs, and how many those are."""
    rows = [("", "runs", "validation", "test accuracy", "parameters", "training", "images/s")]
    for item in groups:
        done = item.finished
        everyone = len(item.entries)
        count = f"{len(done)}" if len(done) == everyone else f"{len(done)} of {everyone}"
        if not done:
            rows.append((item.name, count, item.status, "", "", "", ""))
            continue
        rows.append(
            (
                item.name,
                count,
                _mean(item.percent("val_accuracy"), 2, " %"),
                _mean(item.percent("test_accuracy"), 2, " %"),
                f"{item.values('parameters')[0]:,.0f}",
                _mean(item.values("training_seconds"), 1, " s"),
                f"{statistics.mean(item.values('images_per_second')):,.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(f"{cell:{'<' if not at else '>'}{widths[at]}}" for at, cell in enumerate(row))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


def to_csv(entries: Sequence[Entry]) -> str:
    """A line a run: folder, settings that differ, seed, status, measures, what went wrong."""
    keys, text = [*_varied(entries), "seed"], io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys, "status", *RESULTS, "error"])
    for entry in entries:
        settings = [entry.setting(key) for key in keys]
        measures = [entry.summary.get(measure, "") for measure in RESULTS]
        error = entry.summary.get("error", "")
        writer.writerow([entry.folder, *settings, entry.status, *measures, error])
    return text.getvalue()


def plot(groups: Sequence[Group]) -> bytes:
    """A PNG of each group's test accuracy: a dot a run, on a bar for mean ± standard deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [textwrap.fill(item.name, 48) for item in groups]
    lines = sum(1 + name.count("\n") for name in names)
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(groups) + 0.15 * lines), layout="constrained")
    axes = figure.add_subplot()
    for row, item in enumerate(groups):
        values = item.percent("test_accuracy")
        if not values:
            axes.text(
                0.5, row, item.status, color="C3", ha="center", va="center",
                transform=axes.get_yaxis_transform(),
            )  # fmt: skip
            continue
        if len(values) > 1:
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            axes.errorbar(mean, row, xerr=deviation, fmt="|", color="0.6", capsize=4, ms=14)
        axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.8, ms=5, mew=0, zorder=3)
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    if not any(item.finished for item in groups):
        axes.set_xticks([])
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_xlabel("test accuracy, % (runs, mean ± sd over seeds)")
    axes.grid(axis="x", alpha=0.3)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _newest(outputs: Path) -> Path:
    folder = newest(find_runs(outputs))
    if folder is None:
        raise UserError(f"latest: no run under {outputs}/: train one with `python -m app.train`")
    # a sweep's runs have numbers for names, and Hydra's own sweeper notes what it was, Optuna's not
    swept = folder.name.isdigit() or (folder.parent / "multirun.yaml").is_file()
    return folder.parent if swept else folder


def _varied(entries: Sequence[Entry]) -> list[str]:
    """The settings that are not the same in all the runs."""
    keys = dict.fromkeys(key for entry in entries for key in entry.settings if key not in APART)
    return [key for key in keys if len({repr(entry.settings.get(key)) for entry in entries}) > 1]


def _mean(values: Sequence[float], digits: int, unit: str) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean}{deviation}{unit}"


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts run 10 of a sweep after run 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]
