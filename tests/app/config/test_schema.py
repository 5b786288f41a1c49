import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.config.schema import (
    AugmentConfig,
    DataConfig,
    DrawConfig,
    ExportConfig,
    LeNetConfig,
    LLTMConfig,
    OptimConfig,
    PredictConfig,
    Pt2Config,
    SeparableConfig,
    TrainConfig,
    TrainerConfig,
    from_mapping,
)
from app.data.datasets import Dataset, Split
from app.models import build_model
from app.runs.folder import data_root
from app.training.distributed import World
from app.training.step import TrainStep
from tests.app.networks import TINY

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    "train": TrainConfig,
    "predict": PredictConfig,
    "export_onnx": ExportConfig,
    "export_pt2": Pt2Config,
}


def compose_config(command, *overrides):
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(command, list(overrides))
    return from_mapping(SCHEMAS[command], OmegaConf.to_container(config, resolve=True))


@pytest.mark.parametrize("command", SCHEMAS)
def test_yaml_and_schema_have_the_same_defaults(command, monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)
    assert compose_config(command) == SCHEMAS[command]()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=lenet", TrainConfig()),
        ("model=lenet_depthwise", TrainConfig(model=LeNetConfig(conv="depthwise"))),
        ("model=lenet_involution", TrainConfig(model=LeNetConfig(conv="involution"))),
        ("model=lltm", TrainConfig(model=LLTMConfig())),
        ("model=separable", TrainConfig(model=SeparableConfig())),
        ("model=tiny", TrainConfig(model=TINY)),
        ("data=mnist", TrainConfig()),
        ("data=fashion_mnist", TrainConfig(data=DataConfig(name="fashion_mnist", augment=False))),
        ("data=kmnist", TrainConfig(data=DataConfig(name="kmnist", augment=False))),
        ("data=qmnist", TrainConfig(data=DataConfig(name="qmnist"))),
        ("data=digits", TrainConfig(data=DataConfig(name="digits", val_size=150))),
        ("optim=adamw", TrainConfig(optim=OptimConfig("adamw", lr=0.008))),
        ("optim=muon", TrainConfig()),
        ("recipe=fast", TrainConfig()),
        (
            "recipe=gap",
            TrainConfig(recipe="gap", model=LeNetConfig(act="ncrelu", head="gap")),
        ),
        (
            "recipe=tiny",
            TrainConfig(
                recipe="tiny",
                model=TINY,
                trainer=TrainerConfig(epochs=50, batch_size=256),
                optim=OptimConfig(ema=0.998),
                augment=AugmentConfig(rotation=8, shift=1.3, scale=0.08, shear=6),
            ),
        ),
        (
            "recipe=best",
            TrainConfig(
                recipe="best",
                model=SeparableConfig(),
                trainer=TrainerConfig(epochs=20, batch_size=256),
                optim=OptimConfig(ema=0.998),
                augment=AugmentConfig(rotation=8, shift=1.4, scale=0.08, shear=7),
            ),
        ),
    ],
)
def test_option_values(override, expected, monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)
    assert compose_config("train", override) == expected


def options():
    """Yield group=option for every file in conf/."""
    for file in sorted((ROOT / "conf").glob("*/*.yaml")):
        yield f"{file.parent.name}={file.stem}"


@pytest.mark.parametrize("option", list(options()))
def test_every_option_trains_a_step(option):
    cfg = compose_config("train", option, "trainer.batch_size=4")
    model = build_model(cfg.model, 10)
    images = torch.randint(0, 256, (8, 1, 28, 28), dtype=torch.uint8)
    split = Split(images, torch.arange(8))
    data = Dataset(cfg.data.name, tuple("0123456789"), 0.1, 0.3, split, split, split)
    step = TrainStep(model, data, cfg, torch.device("cpu"), World())
    before = [parameter.clone() for parameter in model.parameters()]
    step.begin(0, 0)
    step.take()
    assert step.statistics[0].isfinite().all()
    assert not all(map(torch.equal, before, model.parameters()))


def test_option_values_cover_every_option():
    (mark,) = test_option_values.pytestmark
    assert {case[0] for case in mark.args[1]} == set(options())


def test_data_root_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("DATA_ROOT", "/some/where")
    assert compose_config("train").data.root == "/some/where"
    assert data_root(Path("no run"), compose_config("predict").data.root) == "/some/where"
    assert compose_config("train", "data.root=here").data.root == "here"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bogus": 1}, "bogus=1: unknown key, choose from augment, data, device, model"),
        ({"model": {"bogus": 1}}, "model={'bogus': 1}: Unable to extract tag using discrimi"),
        ({"model": {"name": "lenet", "x": 1}}, "model.x=1: unknown key, choose from act, conv, he"),
        ({"model": {"name": "lltm", "act": "relu"}}, "model.act=relu: is for model=lenet"),
        ({"model": {"name": "foo"}}, "model={'name': 'foo'}: Input tag 'foo' found using 'name' d"),
        ({"model": 3}, "model=3: Input should be a valid dictionary or object"),
        ({"data": {"fallback": "kmnist"}}, "fallback=kmnist: Input should be 'digits' or null"),
        ({"optim": {"lr": float("inf")}}, "optim.lr=inf: Input should be a finite number"),
        ({"optim": {"lr": True}}, "optim.lr=true: Input should be a valid number"),
        ({"optim": {"warmup": 1.0}}, "optim.warmup=1: Input should be less than 1"),
        ({"trainer": {"epochs": 2.0}}, "trainer.epochs=2.0: Input should be a valid integer"),
        ({"trainer": {"epochs": "x"}}, "trainer.epochs=x: Input should be a valid integer"),
        (
            {"trainer": {"epochs": 0}},
            "epochs=0: Input should be greater than or equal to 1",
        ),
        *(
            ({"trainer": {key: 10**20}}, f"trainer.{key}={10**20}: Input should be less than 2147")
            for key in ("epochs", "batch_size", "log_every", "checkpoint_steps")
        ),
        ({"trainer": {"batch_size": None}}, "batch_size=null: Input should be a valid integer"),
        ({"data": {"augment": 2}}, "data.augment=2: Input should be true or false"),
        ({"trainer": {"compile": "no"}}, "compile=no: Input should be 'auto', true or false"),
        ({"device": None}, "device=null: Input should be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:٣"}, "device=cuda:٣: Input should be auto, cpu, cuda or cuda:N"),
        ({"seed": 2**32}, "seed=4294967296: Input should be less than 4294967296"),
    ],
)
def test_errors_name_key_value_and_limits(values, message):
    with pytest.raises(UserError) as caught:
        from_mapping(TrainConfig, values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "key", "allowed"),
    [
        (ExportConfig, "exporter", "'symbolic', 'dynamo' or null"),
        (ExportConfig, "layout", "'function', 'standard', 'both' or null"),
        (ExportConfig, "quantize", "'int8' or null"),
    ],
)
def test_errors_list_null_where_it_is_allowed(schema, key, allowed):
    for value in ("x", 1):
        with pytest.raises(UserError, match=f"^{key}={value}: Input should be {allowed}$"):
            from_mapping(schema, {key: value})


def test_blank_text_raises():
    with pytest.raises(UserError, match=r"^host= : Input should not be blank$"):
        from_mapping(DrawConfig, {"host": " "})


def test_dataclass_constructor_checks_limits():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        TrainerConfig(epochs=0)


def test_allowed_values_are_kept():
    values = {
        "model": {"name": "lenet", "act": "ncrelu"},
        "data": {"fallback": None},
        "optim": {"lr": 0.5, "weight_decay": 0.0},
        "device": "cuda:3",
    }
    cfg = from_mapping(TrainConfig, values)
    assert cfg.model == LeNetConfig(act="ncrelu")
    assert (cfg.data.fallback, cfg.optim.lr, cfg.device) == (None, 0.5, "cuda:3")
    assert from_mapping(TrainConfig, dataclasses.asdict(cfg)) == cfg


def test_command_line_imports_no_heavy_packages():
    heavy = "{'torch', 'torchvision', 'sklearn', 'onnx', 'onnxruntime', 'tensorboard'}"
    code = f"import sys, app.train, app.runs.compare; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("schema", [PredictConfig, ExportConfig, Pt2Config, DrawConfig])
def test_latest_checkpoint_is_that_of_the_newest_run(schema):
    assert from_mapping(schema, {"checkpoint": "latest"}).checkpoint is None
    assert from_mapping(schema, {"checkpoint": "./latest"}).checkpoint == "./latest"
