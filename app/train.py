"""Command: train a network, or resume a run."""

from app.config.cli import hydra_main
from app.config.schema import TrainConfig


@hydra_main("train", TrainConfig)
def main(cfg: TrainConfig) -> float | None:
    """Train a network; return its validation accuracy, the objective of sweepers."""
    from app.training.trainer import train

    return train(cfg).get("val_accuracy")


if __name__ == "__main__":
    main()
