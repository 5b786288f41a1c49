import json
import sys
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from app.errors import RunError
from app.files import write_atomically
from app.runs import CONFIG, SUMMARY, run_name

UNUSED = "multirun.yaml"  # Hydra writes it before it looks whether the values can be had


class Sweep:
    """The runs of a command with several values: their folder, and how each of them has ended.

    Attributes:
        ended: An entry for each run that is over: why it failed, None if it did not.
    """

    def __init__(self) -> None:
        self.ended: list[Exception | None] = []
        self._folder: Path | None = None

    def folder(self, outputs: str) -> str:
        """The folder to make in `outputs` for them all."""
        self._folder = self._folder or Path(outputs).expanduser() / run_name()
        return str(self._folder)

    def fail(self, cfg: DictConfig, error: Exception) -> None:
        """Say that the run at hand has failed, and leave in its folder what the report needs."""
        self.ended.append(error)
        folder, reason = Path(HydraConfig.get().runtime.output_dir), " ".join(str(error).split())
        with suppress(ValueError):
            folder = folder.relative_to(Path.cwd())
        print(f"failed: {folder}: {reason}", file=sys.stderr, flush=True)
        # where the disk is full there is no place for it
        with suppress(OSError, RunError):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / CONFIG).is_file():
                (folder / CONFIG.parent).mkdir(exist_ok=True)
                OmegaConf.save(cfg, folder / CONFIG, resolve=True)
            if not (folder / SUMMARY).is_file():
                failure = {"status": "failed", "error": reason}
                write_atomically(folder / SUMMARY, json.dumps(failure, indent=2).encode())

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the folder again if nothing came to run.

        Raises:
            RunError: Some of the runs have failed; the exit code is that of the first.
        """
        if self._folder and self._folder.is_dir():
            files = list(self._folder.iterdir())
            if all(file.name == UNUSED for file in files):
                with suppress(OSError):  # of the parents, that others are in them
                    for file in files:
                        file.unlink()
                    for folder in (self._folder, *self._folder.parents[:2]):
                        folder.rmdir()
        failed = [error for error in self.ended if error]
        if failed and not (kind and issubclass(kind, KeyboardInterrupt)):
            result = RunError(f"{len(failed)} of {len(self.ended)} runs failed")
            result.exit_code = getattr(failed[0], "exit_code", 1)
            raise result
