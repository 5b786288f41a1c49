"""Installed libraries: their symbols, and the errors and warnings of `import ops`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ops
from ops.core import library

FOLDER = Path(ops.__file__).parent
LIBRARIES = sorted(FOLDER.glob("_C*.so"))
STABLE = [path for path in LIBRARIES if "eager" not in path.name]


def symbols(library: Path, kind: str) -> list[str]:
    """Return the demangled dynamic symbols of a library: "defined" or "undefined"."""
    if not shutil.which("nm"):
        pytest.skip("needs nm (binutils)")
    command = ["nm", "--dynamic", "--demangle", f"--{kind}-only", library]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("library", STABLE, ids=lambda path: path.name)
def test_only_the_stable_abi_is_used(library):
    """Expect C shims only: PyTorch's C++ symbols change between versions."""
    names = symbols(library, "undefined")
    assert any("torch_" in name for name in names)  # C shims: nm has read the symbol table
    assert not [name for name in names if re.search(r"\b(at|c10|torch)::", name)]
    assert not [name for name in names if re.search(r"\bU _?Py", name)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_only_the_entry_point_is_exported(library):
    """Expect nothing of the C++ runtime: PyTorch may have another copy."""
    names = [line.split()[-1] for line in symbols(library, "defined")]
    assert names == ([f"PyInit_{library.name.split('.')[0]}"] if library not in STABLE else [])


@pytest.mark.parametrize("library", STABLE, ids=lambda path: path.name)
def test_messages_use_no_iostreams(library):
    names = symbols(library, "undefined")
    assert not [name for name in names if re.search(r"\bstd::.*(stream|locale)", name)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_new_symbols_of_glibc_are_replaced(library):
    """See ops/core/glibc.cpp."""
    names = symbols(library, "undefined")
    new = re.compile(r"__libc_single_threaded|dlsym@GLIBC_2\.3")
    assert not [name for name in names if new.search(name)]


def test_private_names_of_torch_are_in_one_file():
    # not in comments; torch._check is documented
    name = re.compile(r"(?m)^[^#]*\b(torch|ctx|forward_ad|symbolic_helper)(\.\w+)*\._(?!_|check\b)")
    private = {path.name for path in FOLDER.rglob("*.py") if name.search(path.read_text())}
    assert private == {"torch_private.py"}


def copy_without_libraries(folder: Path) -> Path:
    return Path(
        shutil.copytree(
            FOLDER, folder / "ops", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    )


def import_ops(folder: Path, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Import `ops` from `folder` in a new Python process."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r})"
    code = f"{path}\n{before}\nimport torch, ops\n{after}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )


def test_import_error_names_the_build_command(tmp_path):
    copy_without_libraries(tmp_path)
    result = import_ops(tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: the operators are not compiled: run `pip install ")


def test_old_torch_raises(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"^ops needs torch >= 2\.10, this is torch 2\.9\.1"):
        library.load()


def copy_with_cpu_kernels(folder: Path) -> Path:
    copy = copy_without_libraries(folder)
    for file in FOLDER.glob("_C.*"):
        shutil.copy(file, copy)
    return copy


def test_damaged_cuda_library_gives_a_warning(tmp_path):
    copy = copy_with_cpu_kernels(tmp_path)
    (copy / "_C_cuda.abi3.so").write_bytes(b"not a library")
    before = "import torch; torch.version.cuda = None"
    again = "torch.version.cuda = '13.0'; ops.core.library.load()"
    result = import_ops(tmp_path, before, f"print('with CUDA', file=sys.stderr); {again}")
    assert result.returncode == 0
    without, with_cuda = result.stderr.split("with CUDA\n")
    assert without == ""
    assert "CUDA kernels cannot be loaded" in with_cuda


RECORD = """
x = torch.ones(1, 2, requires_grad=True)
with torch.autocast("cpu"):
    y = ops.gelu(ops.exp(x))
print(type(y.grad_fn).__name__)
print(y.dtype, torch.autograd.grad(y.sum(), x)[0].isfinite().all().item())
"""


def test_eager_library_of_another_torch_is_ignored(tmp_path):
    copy = copy_with_cpu_kernels(tmp_path)
    (copy / "_C_eager_2_10_0_cpu.abi3.so").write_bytes(b"not a library")
    result = import_ops(tmp_path, after=RECORD)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["gelu_functionBackward", "torch.float32 True"]


PYTHON_AUTOGRAD = """
x = torch.ones(1, 2, 3, requires_grad=True)
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
    y = ops.ncrelu(x)
print(type(y.grad_fn).__name__, [(x.dtype, x.numel()) for x in kept])
print(torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones(1, 2, 3)))
y = ops.exp(x).flatten()
(jacobian,) = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True)
print(torch.equal(jacobian.view(6, 6), y.diag()))
"""


def test_python_autograd_saves_only_signs_and_takes_batched_gradients(tmp_path):
    result = import_ops(copy_with_cpu_kernels(tmp_path).parent, after=PYTHON_AUTOGRAD)
    assert result.stdout.splitlines() == [
        "ncrelu_with_signs_functionBackward [(torch.uint8, 2)]",
        *("True", "True"),
    ], result.stderr


def test_damaged_eager_library_gives_a_warning(tmp_path):
    copy = copy_with_cpu_kernels(tmp_path)
    (copy / f"{library.EAGER}.abi3.so").write_bytes(b"not a library")
    result = import_ops(tmp_path, after=RECORD)
    assert "Python does their work" in result.stderr
    assert result.stdout.splitlines() == ["gelu_functionBackward", "torch.float32 True"]


def test_loaded_libraries_are_printed():
    code = "import ops, runpy; runpy.run_module('ops', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"torch {torch.__version__}, CPU capability ")
    assert re.match(r"CPU kernels: .*/ops/_C\..*so$", lines[0])
    assert lines[1].startswith("autograd, autocast and calls in C++: ")
    eager = library.has_eager()
    assert lines[1].endswith(".so") == eager
