import json
import sys
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from app.config.errors import RunError
from app.runs.files import write_atomically
from app.runs.folder import CONFIG, SUMMARY, run_name

UNUSED = "multirun.yaml"  # Hydra writes it before it looks whether the values can be had


class Sweep:
    """The runs of a command with several values: their folder, and how each of them has ended.

    Attributes:
        ended: The exit codes of the runs that are over; their exceptions would keep their memory.
    """

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._made: list[Path] = []  # its folder, then those around it

    def folder(self, outputs: str) -> str:
        """The folder to make in `outputs` for them all."""
        if not self._made:
            folder = Path(outputs).expanduser() / run_name()
            self._made = [path for path in (folder, *folder.parents[:2]) if not path.exists()]
        return str(self._made[0])

    def fail(self, cfg: DictConfig, error: Exception) -> None:
        """Say that the run at hand has failed, and leave in its folder what the report needs."""
        self.ended.append(getattr(error, "exit_code", 1))
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
        self._tidy()
        failed = [code for code in self.ended if code]
        # Optuna's sweeper raises an error of its own when there is no result at all
        useless = kind is not None and issubclass(kind, ValueError) and all(self.ended)
        if failed and (kind is None or useless):
            result = RunError(f"{len(failed)} of {len(self.ended)} runs failed")
            result.exit_code = failed[0]
            raise result

    def _tidy(self) -> None:
        files = list(self._made[0].iterdir()) if self._made and self._made[0].is_dir() else []
        if any(file.name != UNUSED for file in files):
            return
        with suppress(OSError):  # Hydra has not come so far, or others have been quick
            for file in files:
                file.unlink()
            for folder in self._made:
                folder.rmdir()
