"""Command: export a network to ONNX."""

from app.config.cli import command
from app.config.schema import ExportConfig


@command("export_onnx", ExportConfig)
def main(cfg: ExportConfig) -> None:
    """Export a trained model to ONNX and check the result."""
    from app.export.export import export  # late: it is slow

    export(cfg)


if __name__ == "__main__":
    main()
