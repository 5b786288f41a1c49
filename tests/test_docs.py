"""Excerpts, file names and links in docs/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXCERPT = re.compile(r"^`([\w./]+)`:\n```\w+\n(.*?)^```", re.M | re.S)
LABEL = re.compile(r"^`[\w./]+`:$", re.M)
LINK = re.compile(r"\]\(([^\s)]+)\)")
EXCERPTS = [
    pytest.param(file, code, id=f"{page.name}-{file}-{code.splitlines()[0].strip()}")
    for page in PAGES
    for file, code in EXCERPT.findall(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_labelled_excerpt_is_found(page):
    text = page.read_text()
    assert len(EXCERPT.findall(text)) == len(LABEL.findall(text))


def test_adding_an_op_shows_every_file_of_an_operator():
    shown = {file for file, _ in EXCERPT.findall((ROOT / "docs/adding-an-op.md").read_text())}
    files = {f"ops/exp/{path.name}" for path in (ROOT / "ops/exp").iterdir() if path.is_file()}
    assert {*files, "tests/ops/entries/exp.py"} <= shown


@pytest.mark.parametrize(("file", "code"), EXCERPTS)
def test_excerpt_matches_file(file, code):
    assert code in (ROOT / file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    """Check paths such as `ops/gelu/op.h`; `x` stands for an operator's name."""
    names = re.findall(r"`((?:ops|app|conf|docs|scripts|tests)/[\w./-]+\.\w+)`", page.read_text())
    for name in names:
        assert (ROOT / re.sub(r"/x(?=[./])", "/gelu", name)).exists(), name


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
