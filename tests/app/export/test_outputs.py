"""Paths of exported files: folders, other files, symbolic links."""

import re

import pytest

from app.config.errors import UserError
from app.config.schema import ExportConfig
from app.export.export import export

pytestmark = pytest.mark.usefixtures("short_latency_benchmark")


def test_symbolic_link_stays_and_its_target_is_replaced(make_run, tmp_path):
    target, link = tmp_path / "folder" / "target.onnx", tmp_path / "link.onnx"
    target.parent.mkdir()
    link.symlink_to(target)
    folder = make_run()
    export(ExportConfig(str(folder), file=str(link), layout="function"))
    assert link.is_symlink() and not target.is_symlink()
    for name, to, says in (
        ("a", "best.pt", "which must end with .onnx"),
        ("b-standard", tmp_path / "b.onnx", "both layouts would be written to "),
    ):
        (tmp_path / f"{name}.onnx").symlink_to(to)
        file = f"{tmp_path}/{name.partition('-')[0]}.onnx"
        with pytest.raises(UserError, match=says):
            export(ExportConfig(checkpoint=str(folder), file=file))


def test_unwritable_checkpoint_folder_names_the_key(make_run, unwritable):
    folder = make_run()
    with pytest.raises(UserError) as raised:
        export(ExportConfig(checkpoint=str(folder), layout="function"))
    reason = "cannot be written: Permission denied"
    assert str(raised.value) == f"checkpoint={folder}: {reason}; choose another path with file=..."


@pytest.mark.parametrize("taken", ["a.onnx", "a.md", "a-standard.onnx"])
def test_folder_in_place_of_an_output_raises_before_the_export(make_run, tmp_path, taken):
    (tmp_path / taken).mkdir()
    file = f"{tmp_path}/a.onnx"
    with pytest.raises(UserError, match=f"^file={file}: {tmp_path}/{taken} is a folder$"):
        export(ExportConfig(checkpoint=str(make_run()), file=file, layout="both"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([taken, "outputs"])


def test_foreign_files_are_not_overwritten(make_run, tmp_path):
    folder, card = make_run(), tmp_path / "README.md"
    card.write_text("# README")
    with pytest.raises(UserError, match=re.escape(f"{card} is not a model card")):
        export(ExportConfig(outputs=str(folder.parent), file=f"{tmp_path}/README.onnx"))
    assert card.read_text() == "# README"
    for _ in range(2):  # an earlier export is replaced
        export(ExportConfig(checkpoint=str(folder), layout="both"))
