"""Command: compare runs."""

import os
import sys

from app.config.options import Parser
from app.config.process import exit_codes
from app.config.schema import ReportConfig, from_mapping


def main() -> None:
    """Compare the runs under a folder: print a table, write `report.csv`."""
    parser = Parser(
        "report",
        description="Compares the runs of a sweep: a table with the mean and standard deviation "
        "over seeds, and report.csv in the folder.",
    )
    newest = "a folder with runs in it, or %(default)s: the newest sweep or run (the default)"
    parser.add_argument("folder", nargs="?", default="latest", help=newest)
    where = "where latest looks (%(default)s); also outputs=FOLDER, as in the other commands"
    parser.add_argument("--outputs", metavar="FOLDER", default="outputs", help=where)
    with exit_codes(os.environ.get("HYDRA_FULL_ERROR") == "1"):
        typed = [f"--{arg}" if arg.startswith("outputs=") else arg for arg in sys.argv[1:]]
        arguments = vars(parser.parse_args(typed))
        from app.runs.compare import report

        report(from_mapping(ReportConfig, arguments))


if __name__ == "__main__":
    main()
