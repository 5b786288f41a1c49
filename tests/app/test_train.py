"""`python -m app.train` in a new process."""

import os
import subprocess
import sys

NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def command(*overrides, folder, **environment):
    """Start `python -m app.train` in `folder`, offline."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("DATA_ROOT", "HYDRA_FULL_ERROR")}
    return subprocess.Popen(
        [sys.executable, "-m", "app.train", *overrides],
        cwd=folder,
        env=inherited | NO_NETWORK | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*overrides, folder, **environment):
    """Run `python -m app.train`; return exit code, stdout and stderr."""
    process = command(*overrides, folder=folder, **environment)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def test_help_lists_groups_and_keys(tmp_path):
    code, output, _ = run("--help", folder=tmp_path)
    assert code == 0
    for word in ("data: digits, fashion_mnist, kmnist, mnist, qmnist", "model: lenet", "epochs: "):
        assert word in output
    assert list(tmp_path.iterdir()) == []
