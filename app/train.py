from app.cli import hydra_main
from app.config import TrainConfig


@hydra_main("train", TrainConfig)
def main(cfg: TrainConfig) -> float | None:
    """Train a model, leave its run folder under `outputs/`: the accuracy that sweepers maximise."""
    from app.training import train

    return train(cfg).get("val_accuracy")


if __name__ == "__main__":
    main()
