"""Command: train a network, or resume a run."""

from app.config.cli import hydra_main
from app.config.schema import TrainConfig


@hydra_main("train", TrainConfig)
def main(cfg: TrainConfig) -> float | None:
    """Train a network in a run folder; return the validation accuracy, which sweepers maximise."""
    from app.training.trainer import train

    return train(cfg).get("val_accuracy")


if __name__ == "__main__":
    main()
