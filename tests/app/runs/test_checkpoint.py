import dataclasses
import errno
import os
import zipfile
from contextlib import suppress

import pytest
import torch

import app.runs.files
from app.config.errors import RunError, UserError
from app.config.schema import LeNetConfig, LLTMConfig, SeparableConfig
from app.models import build_model
from app.runs.checkpoint import FORMAT, Checkpoint, load_checkpoint, save_checkpoint
from tests.app.networks import edit_checkpoint


def make_checkpoint(act="ncrelu", conv="depthwise"):
    cfg = LeNetConfig(act, conv)
    return Checkpoint(
        model=build_model(cfg, 10).state_dict(),
        model_config=dataclasses.asdict(cfg),
        data={
            "name": "digits",
            "classes": list("0123456789"),
            "mean": 0.1,
            "std": 0.3,
            "fallback_from": None,
            "val_size": 150,
            "split_seed": 0,
        },
        metrics={"epoch": 3, "val_accuracy": 0.5},
    )


def test_save_and_load(tmp_path):
    checkpoint = make_checkpoint()
    save_checkpoint(tmp_path / "best.pt", checkpoint)
    loaded = load_checkpoint(tmp_path / "best.pt")
    torch.testing.assert_close(loaded.model, dict(checkpoint.model), rtol=0, atol=0)
    for name in ("model_config", "data", "metrics"):
        assert getattr(loaded, name) == getattr(checkpoint, name)
    assert load_checkpoint(tmp_path).data == checkpoint.data  # best.pt of a run folder
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_file_loads_with_weights_only(tmp_path):
    save_checkpoint(tmp_path / "best.pt", make_checkpoint())
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    assert content["format"] == FORMAT
    assert type(content["model"]["classifier.0.weight"]) is torch.Tensor


def test_loaded_network_has_equal_logits(tmp_path):
    model = build_model(LeNetConfig("gelu", "depthwise"), 10).eval()
    checkpoint = make_checkpoint("gelu")
    checkpoint.model = model.state_dict()
    save_checkpoint(tmp_path / "best.pt", checkpoint)
    loaded = load_checkpoint(tmp_path / "best.pt").network
    images = torch.randn(2, 1, 28, 28)
    assert not loaded.training
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


@pytest.mark.parametrize("failing", ["fsync", "replace", "write"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "last.pt"
    save_checkpoint(path, make_checkpoint())
    before = path.read_bytes()

    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    if failing == "write":
        monkeypatch.setattr(app.runs.files.Path, "open", no_space)
    else:
        target = app.runs.files.os if failing == "fsync" else app.runs.files.Path
        monkeypatch.setattr(target, failing, no_space)
    with pytest.raises(RunError, match=r"last\.pt: cannot be written: No space left on device"):
        save_checkpoint(path, make_checkpoint("relu"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_truncated_file_raises(tmp_path, share):
    path = tmp_path / "best.pt"
    save_checkpoint(path, make_checkpoint())
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"checkpoint=.*best\.pt: damaged, or not a checkpoint"):
        load_checkpoint(path)


def test_damaged_weights_raise(tmp_path):
    """Change bytes that torch.load does not verify."""
    path = tmp_path / "best.pt"
    save_checkpoint(path, make_checkpoint())
    content = bytearray(path.read_bytes())
    weights = load_checkpoint(path).model["classifier.0.weight"].numpy().tobytes()
    content[content.index(weights) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)


def test_no_bit_of_the_directory_changes_weights(tmp_path, monkeypatch):
    """torch.load reads zeros for an entry that is marked as a folder."""
    monkeypatch.setattr("app.runs.checkpoint.build_model", lambda *_: torch.nn.Linear(2, 2))
    checkpoint = make_checkpoint()
    checkpoint.model = dict(torch.nn.Linear(2, 2).state_dict())
    path = tmp_path / "best.pt"
    save_checkpoint(path, checkpoint)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        bits = range(8 * archive.start_dir, 8 * len(content))
    loaded = 0
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            file.seek(bit // 8)
            file.write(bytes([content[bit // 8] ^ 1 << bit % 8]))
            with suppress(UserError):
                model = load_checkpoint(path).model
                assert all(torch.equal(model[key], checkpoint.model[key]) for key in model), bit
                loaded += 1
            file.seek(bit // 8)
            file.write(content[bit // 8 : bit // 8 + 1])
    assert 0 < loaded < len(bits)


def test_checkpoint_without_digest_loads(tmp_path):
    path = tmp_path / "best.pt"
    save_checkpoint(path, make_checkpoint())
    content = torch.load(path, weights_only=True)
    del content["digest"]
    torch.save(content, path)
    load_checkpoint(path)


@pytest.mark.parametrize("name", ["model", "data", "training"])
def test_other_digest_raises(tmp_path, name):
    checkpoint = make_checkpoint()
    checkpoint.training = {"state": [{"exp_avg": torch.zeros(3, 3)}, 1.0]}
    path = tmp_path / "last.pt"
    save_checkpoint(path, checkpoint)
    content = torch.load(path, weights_only=True)
    torch.save(content, path)
    load_checkpoint(path)
    if name == "data":
        content["data"]["mean"] += 1e-9
    else:
        tensor = content["model"] if name == "model" else content["training"]["state"][0]
        next(iter(tensor.values())).view(torch.int32)[0, 0] ^= 1
    torch.save(content, path)
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)


def raise_(error):
    def function(*arguments, **options):
        raise error

    return function


def nested_references():
    """Return lists that are small in the file, and 2 ** 40 values if each is followed."""
    values = [0]
    for _ in range(40):
        values = [values, values]
    return values


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1).expand(2**20, 2**20),
        torch.zeros(2**20, device="meta"),
        torch.eye(3).to_sparse(),
        nested_references(),
    ],
)
def test_contents_larger_than_the_file_raise(tmp_path, value):
    path = tmp_path / "last.pt"
    torch.save({"format": FORMAT, "training": {"state": value}}, path)
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "value", [torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj()]
)
def test_lazily_negated_tensors_raise(tmp_path, value):
    path = tmp_path / "last.pt"
    torch.save({"format": FORMAT, "digest": "", "training": {"state": value}}, path)
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize("target", ["torch.load", "app.runs.checkpoint.build_model"])
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_out_of_memory_is_not_called_damage(tmp_path, monkeypatch, target, error):
    save_checkpoint(tmp_path / "best.pt", make_checkpoint())
    monkeypatch.setattr(target, raise_(error))
    with pytest.raises(type(error)):
        load_checkpoint(tmp_path / "best.pt")


def test_unreadable_medium_is_not_called_damage(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "best.pt", make_checkpoint())
    monkeypatch.setattr(torch, "load", raise_(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(UserError, match=r"best\.pt: cannot be read: Input/output error"):
        load_checkpoint(tmp_path / "best.pt")


def test_compressed_archive_raises(tmp_path):
    path = tmp_path / "best.pt"
    checkpoint = make_checkpoint()
    checkpoint.training = {"state": torch.zeros(2**20)}
    save_checkpoint(path, checkpoint)
    with zipfile.ZipFile(path) as stored:
        entries = [(entry.filename, stored.read(entry)) for entry in stored.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)


def test_other_file_raises(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"checkpoint=.*model\.pt: no such file"):
        load_checkpoint(path)
    path.write_text("hello")
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(path)
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="not a checkpoint of this program"):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="not a checkpoint of this program"):
        load_checkpoint(path)
    torch.save({"format": FORMAT, "model": {}}, path)
    with pytest.raises(UserError, match="model_config is missing"):
        load_checkpoint(path)


def test_code_in_a_file_is_not_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"format": FORMAT, "model": Trap()}, tmp_path / "best.pt")
    with pytest.raises(UserError, match="damaged, or not a checkpoint"):
        load_checkpoint(tmp_path / "best.pt")
    assert not (tmp_path / "sprung").exists()


def test_newer_format_raises(tmp_path):
    path = tmp_path / "best.pt"
    save_checkpoint(path, make_checkpoint())
    content = torch.load(path, weights_only=True) | {"format": FORMAT + 1}
    torch.save(content, path)
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, made by a newer version"):
        load_checkpoint(path)


def set_weight(value):
    return lambda checkpoint: next(iter(checkpoint.model.values())).fill_(value)


def set_classes(names):
    return lambda checkpoint: checkpoint.data.update(classes=names)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: c.model.popitem(), "Missing key"),
        (lambda c: c.model_config.update(act="gelu"), "size mismatch"),
        (lambda c: c.model_config.update(foo=1), "unknown key"),
        (lambda c: setattr(c, "model", None), "model=null: Input should be a valid dictionary"),
        (
            lambda c: setattr(c, "metrics", {"epoch": "two"}),
            r"metrics\.epoch\.int=two: Input should be",
        ),
        (set_weight(torch.nan), "must be finite numbers of type float32 or int64"),
        (set_weight(-torch.inf), "must be finite numbers of type float32 or int64"),
        (lambda c: c.data.pop("classes"), "data.classes is missing"),
        (lambda c: c.data.pop("name"), "data.name is missing"),
        (lambda c: c.data.update(name="cifar"), "data.name=cifar: Input should be 'mnist'"),
        (lambda c: c.data.update(val_size="x"), "data.val_size=x: Input should be a valid integer"),
        (lambda c: c.data.update(std=0.0), "data.std=0: Input should be greater than 0"),
        (lambda c: c.data.update(std="x"), "data.std=x: Input should be a valid number"),
        (lambda c: c.data.update(mean=torch.nan), "data.mean=nan: Input should be a finite number"),
        (set_classes([*range(10)]), "data.classes.0=0: Input should be a valid string"),
        (
            set_classes([*"012345678", "\x1b[2J"]),
            r"classes\.9=\\x1b\[2J: Input should be print",
        ),
        (set_classes(list("0123456788")), "data.classes=.*: Input should have different names"),
        (set_classes([]), r"data.classes=\[\]: List should have at least 10 items"),
    ],
)
def test_mismatched_parts_raise(tmp_path, spoil, reason):
    save_checkpoint(tmp_path / "best.pt", make_checkpoint())
    edit_checkpoint(tmp_path / "best.pt", spoil)
    with pytest.raises(UserError, match=reason) as error:
        load_checkpoint(tmp_path / "best.pt")
    assert str(error.value).startswith(f"checkpoint={tmp_path / 'best.pt'}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [LeNetConfig(), LLTMConfig()])
def test_checkpoint_of_0_1_0(make_run, model):
    """Such a checkpoint has the keys of a LeNet for every network, and no name for a LeNet."""
    path = make_run(model=model) / "best.pt"
    checkpoint = load_checkpoint(path)
    config = {"act": "relu", "conv": "standard", "head": "fc"}
    if model.name == "lltm":
        config["name"] = "lltm"
    edit_checkpoint(path, lambda content: setattr(content, "model_config", config))
    loaded = load_checkpoint(path)
    assert loaded.model_config == model
    torch.testing.assert_close(loaded.network.state_dict(), checkpoint.model)


def test_damaged_checkpoint_of_another_network_names_the_key(make_run):
    path = make_run(model=SeparableConfig()) / "best.pt"
    edit_checkpoint(path, lambda content: content.data.pop("classes"))
    with pytest.raises(UserError, match=r"^checkpoint=.*best\.pt: its contents do not fit"):
        load_checkpoint(path)
