"""Expected failures are converted: missing packages, out of memory, a full disk."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import ops  # noqa: F401 (registers torch.ops.lenet_ops)
from app.config.errors import RunError, to_run_error

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bare_python(tmp_path):
    """Return a function that runs Python without site-packages in a copy of app/."""
    shutil.copytree(ROOT / "app", tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["pyproject.toml"], "`cd {} && bash scripts/setup.sh && source .venv/bin/activate`"),
        ([], "`pip install 'lenet-ops[app]'`"),  # an installed copy
    ],
)
def test_missing_packages_are_one_line(bare_python, tmp_path, files, remedy):
    for name in files:
        (tmp_path / name).touch()
    remedy = remedy.format(tmp_path)
    for command in ("app.train", "app.report"):
        done = bare_python("-m", command)
        line = f"error: pydantic is missing: {remedy}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_import_without_packages_raises(bare_python):
    code = "try:\n import app\nexcept ModuleNotFoundError as error:\n print(error.name, error)"
    done = bare_python("-c", code)
    line = "pydantic pydantic is missing: `pip install 'lenet-ops[app]'`\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**50),
        lambda: torch.ops.lenet_ops.ncrelu(torch.empty(1, 1, 1).expand(2**20, 2**20, 16), 1),
        lambda: numpy.empty(2**50),
        lambda: bytearray(2**55),
    ],
)
def test_out_of_memory_is_one_line(main, capsys, allocate):
    assert main(command="predict", task=lambda cfg: allocate()) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch("error: out of memory(: (can't|Unable to) allocate .{,150})?", line)


def test_full_disk_while_compiling_is_a_run_error():
    from app.config.errors import RunError, to_run_error

    def backend(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RuntimeError) as raised:
        torch.compile(torch.exp, backend=backend)(torch.ones(1))
    converted = to_run_error(raised.value)
    assert isinstance(converted, RunError)
    assert str(converted) == "standard output or the temporary folder: No space left on device"


@pytest.mark.parametrize("failure", [MemoryError(), OSError(errno.ENOSPC, "No space left")])
@pytest.mark.parametrize("hidden", [False, True])
def test_mistake_in_a_handler_is_no_expected_failure(failure, hidden):
    from app.config.errors import to_run_error

    with pytest.raises(KeyError) as raised:
        try:
            raise failure
        except type(failure):
            if hidden:
                raise KeyError("key") from None
            raise KeyError("key")  # noqa: B904
    assert to_run_error(raised.value) is raised.value


def test_missing_operator_library_is_a_run_error():
    converted = to_run_error(ImportError("not compiled: run this", name="ops"))
    assert isinstance(converted, RunError)
    assert str(converted) == "not compiled: run this"
    other = ImportError("no module", name="torch")
    assert to_run_error(other) is other
