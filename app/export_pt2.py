"""Command: compile a network for C++ programs without Python."""

from app.config.cli import command
from app.config.schema import Pt2Config


@command("export_pt2", Pt2Config)
def main(cfg: Pt2Config) -> None:
    """Compile a trained model by AOTInductor and check the result."""
    from app.export.pt2 import export_pt2  # late: it is slow

    export_pt2(cfg)


if __name__ == "__main__":
    main()
