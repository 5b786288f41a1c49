"""The steps of docs/adding-an-op.md: a renamed copy of ops/exp passes the operator tests."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
TESTS = ("values", "autograd", "transforms", "arguments", "autocast", "onnx")
SMALL = "myexp and not bulk and not cuda and not sparse"
# Not the operator's name.
PROTECTED = ("std::exp", "return exp(x)", "torch.exp", "op.Exp", "Exponential", "exp' = exp")


def rename(text):
    """Return the source with the operator `exp` renamed to `myexp`."""
    for i, name in enumerate(PROTECTED):
        text = text.replace(name, f"@{i}@")
    text = re.sub(r"(?<![a-z])exp(?![a-z])", "myexp", text).replace("Exp", "MyExp")
    for i, name in enumerate(PROTECTED):
        text = text.replace(f"@{i}@", name)
    return text


def copy_operator(folder):
    for source in ("ops", "tests/ops"):
        ignored = shutil.ignore_patterns("__pycache__", "_C_cuda*", "_C_eager*")
        shutil.copytree(ROOT / source, folder / source, ignore=ignored)
    for name in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(folder / "ops/exp", folder / "ops/myexp")
    for file in (folder / "ops/myexp").iterdir():
        file.write_text(rename(file.read_text()))
    entries = folder / "tests/ops/entries"
    code = rename((entries / "exp.py").read_text())
    for file in entries.glob("[!_]*.py"):  # the tests of the other operators are not collected
        file.unlink()
    (entries / "myexp.py").write_text(code)
    package = folder / "ops/__init__.py"
    lines = package.read_text().replace(
        "from ops.gelu", "from ops.myexp import MyExp, myexp  # noqa: E402\nfrom ops.gelu"
    )
    package.write_text(lines)


def build(folder):
    """Compile the new operator's CPU source; load it after ops/_C."""
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-std=c++17", "-O1", "-w", "-Wno-psabi"),
            "-DTORCH_TARGET_VERSION=0x020a000000000000",
            *(f"-I{path}" for path in (folder / "ops", TORCH / "include")),
            f"-I{sysconfig.get_paths()['include']}",
            folder / "ops/myexp/cpu.cpp",
            *("-o", folder / "ops/myexp.so", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch"),
        ],
        check=True,
    )
    package = folder / "ops/__init__.py"
    load = f"library.load()\n__import__('torch').ops.load_library({str(folder / 'ops/myexp.so')!r})"
    package.write_text(package.read_text().replace("library.load()", load))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_copy_of_exp(tmp_path):
    copy_operator(tmp_path)
    build(tmp_path)
    files = [f"tests/ops/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-k", SMALL, *files], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 100
