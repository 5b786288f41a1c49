"""Excerpts and file names in docs/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXCERPT = re.compile(r"^`([\w./]+)`:\n```\w+\n(.*?)^```", re.M | re.S)
EXCERPTS = [
    pytest.param(file, code, id=f"{page.name}-{file}-{code.splitlines()[0].strip()}")
    for page in PAGES
    for file, code in EXCERPT.findall(page.read_text())
]


@pytest.mark.parametrize(("file", "code"), EXCERPTS)
def test_excerpt_matches_file(file, code):
    assert code in (ROOT / file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    """Check paths such as `ops/gelu/op.h`; `x` stands for an operator's name."""
    names = re.findall(r"`((?:ops|app|conf|docs|scripts|tests)/[\w./-]+\.\w+)`", page.read_text())
    for name in names:
        assert (ROOT / re.sub(r"/x(?=[./])", "/gelu", name)).exists(), name
