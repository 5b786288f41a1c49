from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """TensorBoard events of a run, in its folder."""

    def __init__(self, folder: str | Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each of the named curves."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
