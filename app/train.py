"""Command: train a network, or resume a run."""

from app.config.cli import run_command, swept_dir, typed_overrides
from app.config.schema import TrainConfig


def main() -> None:
    """Train a network."""
    run_command("train", TrainConfig, task)


def task(cfg: TrainConfig) -> float | None:
    """Import what the command needs, and train; return the objective of sweepers."""
    from app.training.trainer import train

    return train(cfg, typed_overrides(), swept_dir()).get("val_accuracy")


if __name__ == "__main__":
    main()
