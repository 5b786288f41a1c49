"""The README's table of settings, links and examples."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from app.config.schema import DrawConfig, ExportConfig, PredictConfig, TrainConfig, format_value

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def settings():
    """Yield the rows of the table of settings: (commands, key, default)."""
    commands = ()
    for line in README.partition("## Settings")[2].partition("\n\nExit codes")[0].splitlines():
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
        "draw": DrawConfig,
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
    for schema in (TrainConfig, PredictConfig, ExportConfig, DrawConfig):
        assert set(keys(schema())) - {"data.name", "model.name", "optim.name"} <= listed


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    headings = {
        line.strip("# ").lower().replace(" ", "-") for line in re.findall("^##.*", README, re.M)
    }
    for target in targets:
        file, _, heading = target.partition("#")
        assert (ROOT / file).is_file() or heading in headings


@pytest.fixture
def exported(trained_run, tmp_path, monkeypatch):
    from app.export.export import export

    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    export(ExportConfig(checkpoint=str(tmp_path)))
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning")
def test_python_examples_run(exported, tmp_path, capsys):
    blocks = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    assert len(blocks) == 4
    capsys.readouterr()
    for block in blocks:
        exec(block, {})
    digit, replaced = capsys.readouterr().out.splitlines()
    assert digit in [str(digit) for digit in range(10)]
    assert replaced == "45 layers converted"  # 11 convolutions, 34 normalisations
    assert (tmp_path / "block.onnx").is_file()
