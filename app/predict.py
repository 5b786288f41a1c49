"""Command: predict the test set or pictures."""

from app.config.cli import run_command
from app.config.schema import PredictConfig


def main() -> None:
    """Predict the test images, or the pictures that `input` names, with a trained model."""
    run_command("predict", PredictConfig, task)


def task(cfg: PredictConfig) -> None:
    """Import what the command needs, and run it."""
    from app.inference.output import predict

    predict(cfg)


if __name__ == "__main__":
    main()
