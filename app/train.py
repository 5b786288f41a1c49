"""Command: train a network, or resume a run."""

from app.config.cli import command, swept_dir, typed_overrides
from app.config.schema import TrainConfig


@command("train", TrainConfig)
def main(cfg: TrainConfig) -> float | None:
    """Train a network; return the objective of sweepers."""
    from app.training.trainer import train  # late: it is slow

    return train(cfg, typed_overrides(), swept_dir()).get("val_accuracy")


if __name__ == "__main__":
    main()
