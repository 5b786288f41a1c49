"""scripts/bench_page.py: tables of docs/benchmarks.md and README.md from CSV files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = (
    "device,torch,op,shape,dtype,format,pass,implementation,ms,floor_ms,fraction_of_floor,"
    "speedup_over_best_peer,graph_ms,graph_speedup_over_best_peer\n"
)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "docs" / "benchmarks")
    shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    for name in ("bench_page.py", "bench/__init__.py", "bench/page.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    return tmp_path


def run(root, *args):
    command = [sys.executable, str(root / "scripts" / "bench_page.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_published_page_is_up_to_date(copy):
    assert run(copy, "--check").returncode == 0
    assert run(copy).returncode == 0
    for name in ("README.md", "docs/benchmarks.md", "docs/benchmarks/below-1.csv"):
        assert (copy / name).read_bytes() == (ROOT / name).read_bytes()


def test_new_measurement_updates_the_tables(copy):
    (copy / "docs" / "benchmarks" / "operators-new.csv").write_text(
        HEADER
        + "chip,2.14,exp,8,float32,nchw,forward,ours,2,1,0.5,0.25,1,0.75\n"
        + "chip,2.14,exp,8,float32,nchw,backward,ours,2,1,0.3,4,1,3\n"
        + "chip,2.14,new,8,float32,nchw,forward+backward,ours,2,1,0.3,9,1,4\n"
        + "chip,2.14,new,9,float32,nchw,forward+backward,ours,2,1,0.3,1,,\n"
        + "chip,2.14,exp,8,float32,nchw,forward,eager,0.5,1,2,1,0.75,1\n"
    )
    assert run(copy, "--check").returncode == 1
    assert run(copy).returncode == 0
    page = (copy / "docs" / "benchmarks.md").read_text()
    headline = "exp | chip | float32 | nchw | 2 | 0.40 (0.30 to 0.50) | 1.00 | 0.25: 8 forward"
    assert f"| {headline} | 1.50, 0.75: 8 forward |" in page
    slow = "0.25: 8 forward float32 nchw | 1 of 2 | 0.75: 8 forward float32 nchw"
    assert f"| exp | chip | 1 of 2 | {slow} |" in page
    speed = (copy / "README.md").read_text().split("<!-- speed -->")[1].splitlines()
    header, row = speed[2], next(line for line in speed if line.startswith("| `new` |"))
    cells = dict(zip(*(line.strip("| ").split(" | ") for line in (header, row)), strict=True))
    assert cells["chip"] == "2.00 (1.00)"
    below = (copy / "docs" / "benchmarks" / "below-1.csv").read_text()
    assert "exp,chip,float32,nchw,8,forward,0.25,0.75\n" in below
    assert "exp,chip,float32,nchw,8,backward" not in below


def test_page_reads_csv_of_bench_ops(copy, tmp_path):
    measured = tmp_path / "measured.csv"
    measured.write_text(
        HEADER
        + "chip,2.14,exp,8,float32,nchw,forward,ours,2,1,0.5,0.25,1,0.75\n"
        + "chip,2.14,exp,8,float32,nchw,forward,eager,0.5,1,2,1,0.75,1\n"
    )
    again = copy / "docs" / "benchmarks" / "operators-new.csv"
    command = [sys.executable, str(ROOT / "scripts" / "bench_ops.py"), "--read", str(measured)]
    subprocess.run([*command, "--csv", str(again)], check=True)
    assert again.read_text() == measured.read_text()
    assert run(copy).returncode == 0
    assert "| exp | chip | float32 | nchw |" in (copy / "docs" / "benchmarks.md").read_text()


def test_page_links_every_file():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for path in (ROOT / "docs" / "benchmarks").iterdir():
        assert f"(benchmarks/{path.name})" in page, path.name
        assert path.stat().st_size < 1 << 20
