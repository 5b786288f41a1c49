from app.cli import hydra_main
from app.config import TrainConfig


@hydra_main("train", TrainConfig)
def main(cfg: TrainConfig) -> None:
    """Train a model and leave its run folder under `outputs/`."""
    from app.training import train

    train(cfg)


if __name__ == "__main__":
    main()
