"""Load the compiled libraries in the folder ops/."""

import re
import warnings
from pathlib import Path

import torch

TORCH_TARGET = (2, 10)
BUILD_COMMAND = "pip install --no-build-isolation -e ."
_BUILD = f"{torch.__version__}_{torch.version.git_version[:8]}"  # a version may have several builds
EAGER = "_C_eager_" + re.sub(r"\W", "_", _BUILD)  # as setup.py names it


def load() -> None:
    """Load ops/_C and, if present and compatible, ops/_C_eager and ops/_C_cuda.

    Raises:
        ImportError: torch is too old, or a required library is not built or cannot be loaded.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_TARGET:
        raise ImportError(f"ops needs torch >= 2.10, this is torch {torch.__version__}", name="ops")
    folder = Path(__file__).parents[1]
    cpu = next(folder.glob("_C.*"), None)
    if cpu is None:
        raise ImportError(
            f"the operators are not compiled: run `{BUILD_COMMAND}` in the project's folder "
            "(from other folders, an installed copy is used)",
            name="ops",
        )
    try:
        torch.ops.load_library(cpu)
    except OSError as error:
        raise ImportError(
            f"the operators cannot be loaded beside torch {torch.__version__} ({error}); rebuild "
            f"them with `{BUILD_COMMAND}`",
            name="ops",
        ) from error
    _load_optional(folder, EAGER, "autograd, autocast and calls", "Python does their work")
    if torch.version.cuda is not None:
        _load_optional(folder, "_C_cuda", "CUDA kernels", "only the CPU works")


def has_eager() -> bool:
    """Return whether the eager library is loaded."""
    return hasattr(torch.ops.lenet_ops_eager, "register_autograd")


def _load_optional(folder: Path, name: str, contents: str, fallback: str) -> None:
    """Load the library `name` if it exists; if that fails, warn that `fallback` applies."""
    library = next(folder.glob(f"{name}.*"), None)
    if library is None:
        return
    try:
        torch.ops.load_library(library)
    except OSError as error:
        warnings.warn(
            f"the operators' {contents} cannot be loaded beside torch {torch.__version__}, "
            f"{fallback} ({error}); rebuild them with `{BUILD_COMMAND}`",
            stacklevel=3,
        )
