"""Command: predict the test set or pictures."""

from app.config.cli import hydra_main
from app.config.schema import PredictConfig


@hydra_main("predict", PredictConfig)
def main(cfg: PredictConfig) -> None:
    """Predict the test images, or the pictures that `input` names, with a trained model."""
    from app.inference.output import predict

    predict(cfg)


if __name__ == "__main__":
    main()
