"""Comparison of runs for `python -m app.report`: table of groups, report.csv."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.contents import RESULTS
from app.config.errors import UserError
from app.config.schema import ReportConfig, counted, format_value, printable
from app.runs.files import csv_text, write_results
from app.runs.folder import (
    NON_HYPERPARAMETERS,
    all_runs,
    flatten,
    is_gone,
    read_settings,
    read_summary,
    warn_once,
)

# Settings that may differ within a group.
# `data.fallback` may differ, because `data.name` names the data set in use.
UNGROUPED = ("seed", "data.fallback", "trainer.log_every", *NON_HYPERPARAMETERS)
# Settings that training resolves (the data set after a fallback, `trainer.epochs=null`), and the
# fields of `summary.json` with their values.
RESOLVED = {"data.name": "dataset", "data.val_size": "val_size", "trainer.epochs": "total_epochs"}


@dataclass
class Entry:
    """A run: folder, settings by dotted key with resolved values, `summary.json`."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]

    def setting(self, key: str) -> str:
        """Return a setting in command-line syntax; "" if the run lacks it."""
        return format_value(self.settings[key]) if key in self.settings else ""

    def label(self, key: str) -> str:
        """Return `key=value` with four significant digits; "" if the run lacks the setting."""
        value = self.settings.get(key)
        text = f"{value:.4g}" if isinstance(value, float) else self.setting(key)
        return f"{key}={text}" if text else ""


@dataclass
class Group:
    """Runs that differ only in `UNGROUPED` settings; named by the settings that vary among all."""

    name: str
    entries: list[Entry]

    def values(self, measure: str, scale: float = 1) -> list[float]:
        """Return `scale` times a measure of each finished run."""
        finished = [e.summary for e in self.entries if e.summary["status"] == "finished"]
        return [scale * float(summary[measure]) for summary in finished]


def report(cfg: ReportConfig) -> None:
    """Print the table of the runs under `folder`; write `report.csv` there."""
    root = _newest(Path(cfg.outputs)) if cfg.folder == "latest" else Path(cfg.folder)
    entries = find_entries(root)
    lines = [f"{root}: {counted(len(entries), 'run')}", "", table(group_runs(entries))]
    for entry in entries:
        if (status := entry.summary["status"]) != "finished":
            remedy = f"continue it with `python -m app.train resume={entry.folder}`"
            error = printable(entry.summary.get("error", remedy))
            lines.append(f"{status}: {entry.folder}: {error}")
    print("\n".join(lines) + "\n", flush=True)
    write_results(root, {"report.csv": to_csv(entries).encode()}, sys.stdout)


def find_entries(root: Path) -> list[Entry]:
    """Read the runs under `root`, oldest start first; skip damaged ones with a warning."""
    entries, damaged = [], []
    for path in all_runs(root):
        try:
            settings, summary = flatten(read_settings(path)), read_summary(path)
        except UserError as error:
            if not is_gone(error):  # deleted meanwhile
                damaged.append(error)
            continue
        settings |= {key: summary[name] for key, name in RESOLVED.items() if name in summary}
        entries.append(Entry(path, settings, summary))
    if not entries:
        raise damaged[0] if damaged else UserError(f"no run under {root}/ any more")
    for reason in damaged:
        warn_once(f"skipped a run: {reason}")
    return entries


def group_runs(entries: Sequence[Entry]) -> list[Group]:
    """Group the runs that differ only in `UNGROUPED` settings, in order of appearance."""
    keys = _varied(entries)
    groups: dict[tuple[str, ...], Group] = {}
    named = [key for key in keys if key == "recipe" or not _follows_recipe(entries, key)]
    for entry in entries:
        name = " ".join(filter(None, (entry.label(key) for key in named))) or "all"
        settings = tuple(entry.setting(key) for key in keys)
        groups.setdefault(settings, Group(name, [])).entries.append(entry)
    return list(groups.values())


def table(groups: Sequence[Group]) -> str:
    """Return one line per group: mean ± standard deviation over its finished runs."""
    rows = [["", "runs", "validation", "test accuracy", "parameters", "training", "images/s"]]
    for item in groups:
        finished, total = len(item.values("parameters")), len(item.entries)
        row = [item.name, str(total) if finished == total else f"{finished} of {total}"]
        if finished:
            row += [
                _format_mean(item.values("val_accuracy", 100), 2, " %"),
                _format_mean(item.values("test_accuracy", 100), 2, " %"),
                f"{item.values('parameters')[0]:,.0f}",
                _format_mean(item.values("training_seconds"), 1, " s"),
                f"{statistics.mean(item.values('images_per_second')):,.0f}",
            ]
        else:
            statuses = {entry.summary["status"] for entry in item.entries}
            row += [" or ".join(sorted(statuses)), "", "", "", ""]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def to_csv(entries: Sequence[Entry]) -> str:
    """Return one line per run: folder, varied settings, seed, status, measures, error."""
    keys, results, rows = [*_varied(entries), "seed"], ("status", *RESULTS, "error"), []
    for entry in entries:
        settings = [entry.setting(key) for key in keys]
        rows.append([entry.folder, *settings, *(entry.summary.get(key, "") for key in results)])
    return csv_text(["run", *keys, *results], rows)


def _newest(outputs: Path) -> Path:
    """Return the folder of the newest run, or of the sweep that it belongs to."""
    folder = all_runs(outputs)[-1]
    # Sweeps number their runs; the basic sweeper also writes multirun.yaml.
    swept = folder.name.isdigit() or (folder.parent / "multirun.yaml").is_file()
    return folder.parent if swept else folder


def _varied(entries: Sequence[Entry]) -> list[str]:
    """Return the keys of the settings that differ among the runs that have them."""

    def values(key: str) -> set[str]:
        runs = [e.settings for e in entries if key in e.settings or not key.startswith("model.")]
        return {repr(settings.get(key)) for settings in runs}

    keys = dict.fromkeys(key for entry in entries for key in entry.settings if key not in UNGROUPED)
    return [key for key in keys if len(values(key)) > 1]


def _follows_recipe(entries: Sequence[Entry], key: str) -> bool:
    """Return whether all runs with the same recipe have the same value of a setting."""
    pairs = {(entry.setting("recipe"), entry.setting(key)) for entry in entries}
    return len(pairs) == len({recipe for recipe, _ in pairs})


def _format_mean(values: Sequence[float], digits: int, unit: str) -> str:
    """Format mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}{unit}"
