"""Command: predict the test set or pictures."""

from app.config.cli import command
from app.config.schema import PredictConfig


@command("predict", PredictConfig)
def main(cfg: PredictConfig) -> None:
    """Predict the test images, or the pictures that `input` names."""
    from app.inference.output import predict  # late: it is slow

    predict(cfg)


if __name__ == "__main__":
    main()
