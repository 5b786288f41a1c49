"""Print the libraries of the operators that are loaded: python -m ops."""

from pathlib import Path

import torch

from ops.core.library import EAGER

PARTS = {
    "_C": "CPU kernels",
    EAGER: "autograd, autocast and calls in C++",
    "_C_cuda": "CUDA kernels",
}


def main() -> None:
    """Print a line for each library."""
    loaded = {Path(path).name.split(".")[0]: path for path in torch.ops.loaded_libraries}
    print(f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}")
    for name, contents in PARTS.items():
        print(f"{contents}: {loaded.get(name, f'no {name} for this PyTorch')}")


if __name__ == "__main__":
    main()
