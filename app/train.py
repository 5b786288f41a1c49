from app.config.cli import hydra_main
from app.config.schema import TrainConfig
from app.runs.sweep import Sweep


@hydra_main("train", TrainConfig, Sweep())
def main(cfg: TrainConfig) -> float | None:
    """Train a model, leave its run folder under `outputs/`: the accuracy that sweepers maximise."""
    from app.training.trainer import train

    return train(cfg).get("val_accuracy")


if __name__ == "__main__":
    main()
