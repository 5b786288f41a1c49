import argparse
import sys

from app.config.errors import RunError, UserError, end_unread, open_closed_outputs, refuse_usage


class Parser(argparse.ArgumentParser):
    """One whose errors are a line, as the other commands' are."""

    error = refuse_usage


def main() -> None:
    """Compare the runs under a folder: print a table, leave `report.csv` and `report.png` there."""
    open_closed_outputs()
    parser = Parser(
        prog="python -m app.report",
        description="Compares the runs of a sweep: a table with the mean and standard deviation "
        "over seeds, and report.csv and report.png in the folder.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="latest",
        help="a folder with runs in it, or %(default)s: the newest sweep (the default)",
    )
    parser.add_argument("--outputs", default="outputs", help="where latest looks (%(default)s)")
    try:
        arguments = parser.parse_args()
        from app.runs.compare import report

        report(arguments.folder, arguments.outputs)
        sys.stdout.flush()
    except BrokenPipeError:
        end_unread()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
