"""Command: compare runs."""

from app.config.cli import command
from app.config.schema import ReportConfig


@command("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    """Print a table of the runs in a folder."""
    from app.runs.compare import report

    report(cfg)


if __name__ == "__main__":
    main()
