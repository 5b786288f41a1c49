"""README and docs/: table of settings, links, pictures and examples."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from app.config.schema import (
    DrawConfig,
    ExportConfig,
    PredictConfig,
    Pt2Config,
    ReportConfig,
    TrainConfig,
    format_value,
)

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "docs" / "operators.md", ROOT / "docs" / "application.md"]
FORMER_HEADINGS = {  # pages elsewhere link to these parts of the README
    *("train", "resume", "sweep", "predict-your-own-pictures", "draw-a-digit", "export"),
    *("use-the-operators", "settings", "install", "source-tree"),
}


def settings():
    """Yield the rows of the table of settings: (commands, key, default)."""
    commands = ()
    table = (ROOT / "docs" / "settings.md").read_text().partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heading := re.fullmatch(r"\*\*(.+)\*\*", cells[0]):
            commands = heading.group(1).split(", ")
        elif commands and line.startswith("|"):
            keys = re.findall(r"`(.+?)`", cells[0])
            defaults = [value.strip("` ") for value in cells[1].split(", ")]
            yield from ((commands, key, value) for key, value in zip(keys, defaults, strict=True))


@pytest.mark.parametrize(("commands", "key", "default"), list(settings()))
def test_defaults_in_the_table(commands, key, default):
    schemas = {
        "train": TrainConfig,
        "predict": PredictConfig,
        "export_onnx": ExportConfig,
        "export_pt2": Pt2Config,
        "draw": DrawConfig,
        "report": ReportConfig,
    }
    for command in commands:
        value = schemas[command]()
        for name in key.split("."):
            value = getattr(value, name)
        assert format_value(value.name if key in ("data", "model", "optim") else value) == default


def test_every_setting_is_in_the_table():
    def keys(cfg, prefix=""):
        for item in fields(cfg):
            value = getattr(cfg, item.name)
            if is_dataclass(value):
                yield from keys(value, f"{prefix}{item.name}.")
            else:
                yield prefix + item.name

    listed = {key for _, key, _ in settings()}
    for schema in (TrainConfig, PredictConfig, ExportConfig, Pt2Config, DrawConfig):
        assert set(keys(schema())) - {"data.name", "model.name", "optim.name"} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_exist(page):
    pictures = re.findall(r'<img src="([^"]+)"|!\[[^]]*\]\(([^)]+)\)', page.read_text())
    assert pictures or page.name == "operators.md"
    for target in pictures:
        assert (page.parent / "".join(target)).is_file()


def test_former_headings_have_anchors():
    text = README.read_text()
    headings = re.findall("^##+ (.*)", text, re.M)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert anchors | set(re.findall('<a id="([^"]+)"></a>', text)) >= FORMER_HEADINGS


@pytest.fixture
def exported(trained_run, tmp_path, monkeypatch):
    from app.export.export import export

    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    export(ExportConfig(checkpoint=str(tmp_path), layout="function"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning")
def test_python_examples_run(exported, tmp_path, capsys):
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    assert len(blocks) == 6
    capsys.readouterr()
    for block in blocks:
        exec(block, {})
    *replaced, digit = capsys.readouterr().out.splitlines()
    assert replaced == ["45 layers converted"] * 2  # 11 convolutions, 34 normalisations
    assert digit in [str(digit) for digit in range(10)]
    assert (tmp_path / "block.onnx").is_file()
