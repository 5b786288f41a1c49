"""Missing packages: the line says how to install them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SET_UP = (
    "`bash scripts/setup.sh && source .venv/bin/activate`, "
    "or `pip install --no-build-isolation '.[app,web]'`"
)


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
        (["pyproject.toml"], SET_UP),
        (["pyproject.toml", ".venv/bin/activate"], "`source .venv/bin/activate`"),
        ([], "`pip install 'lenet-ops[app,web]'`"),  # an installed copy
    ],
)
def test_missing_packages_are_one_line(bare_python, tmp_path, files, remedy):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for command in ("app.train", "app.report"):
        done = bare_python("-m", command)
        line = f"error: pydantic is missing: {remedy}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_import_without_packages_raises(bare_python):
    code = "try:\n import app\nexcept ModuleNotFoundError as error:\n print(error.name, error)"
    done = bare_python("-c", code)
    line = "pydantic pydantic is missing: `pip install 'lenet-ops[app,web]'`\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")


def test_missing_package_of_the_active_environment(monkeypatch, tmp_path):
    from app.config import errors

    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    missing = errors.to_run_error(ModuleNotFoundError("no uvicorn", name="uvicorn"))
    assert (missing.exit_code, str(missing)) == (2, f"uvicorn is missing: {SET_UP}")
