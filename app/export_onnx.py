"""Command: export a network to ONNX."""

from app.config.cli import run_command
from app.config.schema import ExportConfig


def main() -> None:
    """Export a trained model to ONNX and check the result."""
    run_command("export_onnx", ExportConfig, task)


def task(cfg: ExportConfig) -> None:
    """Import what the command needs, and run it."""
    from app.export.export import export

    export(cfg)


if __name__ == "__main__":
    main()
