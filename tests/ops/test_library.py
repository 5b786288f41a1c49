"""The libraries as installed: their symbols, and what `import ops` says when it cannot work."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ops

FOLDER = Path(ops.__file__).parent
LIBRARIES = sorted(FOLDER.glob("_C*.so"))


def test_libraries_are_there():
    assert "_C" in {library.name.split(".")[0] for library in LIBRARIES}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_only_the_stable_abi_is_used(library):
    """Another torch has these C++ functions elsewhere, or not at all; the C shims stay."""
    if not (shutil.which("nm") and shutil.which("c++filt")):
        pytest.skip("needs nm and c++filt (binutils)")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = subprocess.run(
        ["c++filt"], input=symbols, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert any("torch_" in name for name in names)  # the shims are listed, so nm read the table
    assert not [name for name in names if re.search(r"\b(at|c10|torch)::", name)]
    assert not [name for name in names if re.search(r"\bU _?Py", name)]  # no Python in there


def copy_without_libraries(folder: Path) -> Path:
    return Path(
        shutil.copytree(
            FOLDER, folder / "ops", ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__")
        )
    )


def import_ops(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Imports the copy of `ops` that is in `folder`, in a new Python."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{before}\nimport ops"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )


def test_import_says_how_to_build(tmp_path):
    copy_without_libraries(tmp_path)
    result = import_ops(tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the operators are not compiled: run `pip install ")


def test_import_refuses_an_old_torch(tmp_path):
    copy_without_libraries(tmp_path)
    result = import_ops(tmp_path, "import torch; torch.__version__ = '2.9.1+cpu'")
    assert result.stderr.splitlines()[-1] == (
        "ImportError: ops needs torch >= 2.10, this is torch 2.9.1+cpu"
    )


def test_import_without_cuda_kernels_still_works(tmp_path):
    """A CUDA library that does not load is a warning: the CPU works."""
    copy = copy_without_libraries(tmp_path)
    for library in LIBRARIES:
        if library.name.startswith("_C."):
            shutil.copy(library, copy)
    (copy / "_C_cuda.abi3.so").write_bytes(b"not a library")
    before = "import torch; torch.version.cuda = '13.0'"
    result = import_ops(tmp_path, before)
    assert result.returncode == 0
    assert "CUDA kernels cannot be loaded" in result.stderr
    before = "import torch; torch.version.cuda = None"
    assert import_ops(tmp_path, before).stderr == ""


def test_public_names():
    for name in ops.__all__:
        assert hasattr(ops, name)
    assert torch.ops.lenet_ops.gelu.default._schema.name == "lenet_ops::gelu"
