"""Command: compile a network for C++ programs without Python."""

from app.config.cli import run_command
from app.config.schema import Pt2Config


def main() -> None:
    """Compile a trained model by AOTInductor and check the result."""
    run_command("export_pt2", Pt2Config, task)


def task(cfg: Pt2Config) -> None:
    """Import what the command needs, and run it."""
    from app.export.pt2 import export_pt2

    export_pt2(cfg)


if __name__ == "__main__":
    main()
