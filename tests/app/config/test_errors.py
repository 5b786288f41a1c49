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


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("project", SET_UP),
        (
            ".",
            "`bash project/scripts/setup.sh && source project/.venv/bin/activate`, "
            "or `pip install --no-build-isolation './project[app,web]'`",
        ),
    ],
)
def test_missing_package_of_the_active_environment(monkeypatch, tmp_path, folder, remedy):
    from app.config import errors

    root = tmp_path / "project"
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "activate").touch()
    (root / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr(errors, "ROOT", root)
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    missing = errors.to_run_error(ModuleNotFoundError("no uvicorn", name="uvicorn"))
    assert (missing.exit_code, str(missing)) == (2, f"uvicorn is missing: {remedy}")
