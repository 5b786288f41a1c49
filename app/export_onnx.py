"""Command: export a network to ONNX."""

from app.config.cli import hydra_main
from app.config.schema import ExportConfig


@hydra_main("export_onnx", ExportConfig)
def main(cfg: ExportConfig) -> None:
    """Export a trained model to ONNX and check the result."""
    from app.export.export import export

    export(cfg)


if __name__ == "__main__":
    main()
