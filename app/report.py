"""Command: compare runs."""

import argparse

from app.config.errors import exit_codes, usage_error


def folder_name(value: str) -> str:
    """Return `value`; raise a ValueError (reported by argparse) if it is blank."""
    if not value.strip():
        raise ValueError
    return value


def main() -> None:
    """Compare the runs under a folder: print a table, write `report.csv` and `report.png`."""
    parser = argparse.ArgumentParser(
        prog="python -m app.report",
        description="Compares the runs of a sweep: a table with the mean and standard deviation "
        "over seeds, and report.csv and report.png in the folder.",
        allow_abbrev=False,
    )
    parser.error = usage_error  # type: ignore[method-assign]
    newest = "a folder with runs in it, or %(default)s: the newest sweep or run (the default)"
    parser.add_argument("folder", nargs="?", type=folder_name, default="latest", help=newest)
    parser.add_argument(
        "--outputs", type=folder_name, default="outputs", help="where latest looks (%(default)s)"
    )
    with exit_codes():
        arguments = parser.parse_args()
        from app.runs.compare import report

        report(arguments.folder, arguments.outputs)


if __name__ == "__main__":
    main()
