"""Comparison of runs for `python -m app.report`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.config.errors import UserError
from app.config.schema import ReportConfig, counted, format_value, printable
from app.runs.folder import (
    NON_HYPERPARAMETERS,
    all_runs,
    flatten,
    read_settings,
    read_summary,
    warn_once,
)

# Settings that may differ within a group. `data.name` names the data set in use.
UNGROUPED = ("seed", "data.fallback", "trainer.log_every", *NON_HYPERPARAMETERS)
# Settings that training resolves (the data set after a fallback, `trainer.epochs=null`), and the
# fields of `summary.json` with their values.
RESOLVED = {"data.name": "dataset", "data.val_size": "val_size", "trainer.epochs": "total_epochs"}
COLUMNS = {  # heading: field of `summary.json`, format
    "validation": ("val_accuracy", ".2%"),
    "test accuracy": ("test_accuracy", ".2%"),
    "seconds": ("training_seconds", ".1f"),
    "images/s": ("images_per_second", ",.0f"),
}


class Entry(NamedTuple):
    """A run: folder, settings that determine its results in command-line syntax, summary.json."""

    folder: Path
    settings: dict[str, str]
    summary: dict[str, Any]


def report(cfg: ReportConfig) -> None:
    """Print the runs in `cfg.folder`: mean ± standard deviation over seeds."""
    root = _newest(Path(cfg.outputs)) if cfg.folder == "latest" else Path(cfg.folder)
    entries = find_entries(root)
    print(f"{root}: {counted(len(entries), 'run')}\n\n{table(group_runs(entries))}")
    for folder, _, summary in entries:
        if (status := summary["status"]) != "finished":
            hint = f"continue it with `python -m app.train resume={folder}`"
            hint = "in another process" if status == "running" else hint
            print(f"{status}: {folder}: {printable(summary.get('error', hint))}")


def find_entries(root: Path) -> list[Entry]:
    """Read the runs under `root`, oldest start first; skip damaged ones with a warning."""
    entries, damaged = [], None
    for folder in all_runs(root, "folder"):
        try:
            settings, summary = flatten(read_settings(folder)), read_summary(folder)
        except UserError as error:
            damaged = error
            warn_once(f"skipped a run: {error}")
            continue
        settings |= {key: summary[name] for key, name in RESOLVED.items() if name in summary}
        shown = {key: format_value(it) for key, it in settings.items() if key not in UNGROUPED}
        entries.append(Entry(folder, shown, summary))
    if damaged and not entries:
        raise damaged
    return entries


def group_runs(entries: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Group the summaries of runs with equal settings; a name has the settings that vary.

    Omit settings of a group that follow from the recipe.
    """
    keys = dict.fromkeys(key for entry in entries for key in entry.settings)
    named = []
    for key in keys:  # compared among the runs that have it: networks differ in their settings
        having = [settings for _, settings, _ in entries if key in settings]
        pairs = {(settings.get("recipe"), settings[key]) for settings in having}
        varies = len({value for _, value in pairs}) > 1
        if varies and (key == "recipe" or len(pairs) > len({recipe for recipe, _ in pairs})):
            named.append(key)
    groups: dict[str, list[dict[str, Any]]] = {}
    for _, settings, summary in entries:
        name = " ".join(f"{key}={settings[key]}" for key in named if key in settings)
        groups.setdefault(name or "all", []).append(summary)
    return groups


def table(groups: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line per group; runs that have not finished count only in the column `runs`."""
    rows = [["", "runs", *COLUMNS]]
    for name, summaries in groups.items():
        finished = [summary for summary in summaries if summary["status"] == "finished"]
        cells = [f"{len(finished)} of {len(summaries)}"]
        for key, form in COLUMNS.values():
            values = [summary[key] for summary in finished]
            deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):{form}}{deviation}" if values else "")
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _newest(outputs: Path) -> Path:
    """Return the folder of the newest run, or of the sweep that it belongs to."""
    folder = all_runs(outputs)[-1]
    # Sweeps number their runs; the basic sweeper also writes multirun.yaml.
    swept = folder.name.isdigit() or (folder.parent / "multirun.yaml").is_file()
    return folder.parent if swept else folder
