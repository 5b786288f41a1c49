import dataclasses
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.config.schema import (
    AugmentConfig,
    DataConfig,
    ExportConfig,
    ModelConfig,
    OptimConfig,
    PredictConfig,
    TrainConfig,
    TrainerConfig,
    allowed,
    from_mapping,
)

SCHEMAS = {"train": TrainConfig, "predict": PredictConfig, "export_onnx": ExportConfig}


def composed(command, *overrides):
    ConfigStore.instance().store(name=f"{command}_schema", node=SCHEMAS[command])
    with initialize_config_module("conf", version_base="1.3"):
        config = compose(command, list(overrides))
    return from_mapping(SCHEMAS[command], OmegaConf.to_container(config, resolve=True))


@pytest.mark.parametrize("command", SCHEMAS)
def test_yaml_and_schema_have_the_same_defaults(command, monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)
    assert composed(command) == SCHEMAS[command]()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=lenet", TrainConfig()),
        ("model=lenet_depthwise", TrainConfig(model=ModelConfig(conv="depthwise"))),
        ("model=lenet_involution", TrainConfig(model=ModelConfig(conv="involution"))),
        ("model=lltm", TrainConfig(model=ModelConfig(name="lltm"))),
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
            TrainConfig(recipe="gap", model=ModelConfig(act="ncrelu", head="gap")),
        ),
        (
            "recipe=best",
            TrainConfig(
                recipe="best",
                model=ModelConfig(act="gelu"),
                trainer=TrainerConfig(epochs=30, batch_size=256),
                optim=OptimConfig("adamw", lr=0.008, ema=0.998),
                augment=AugmentConfig(rotation=12, shift=2, scale=0.12, shear=10),
            ),
        ),
    ],
)
def test_options_of_the_groups(override, expected, monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)
    assert composed("train", override) == expected


def test_data_root_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("DATA_ROOT", "/some/where")
    assert composed("train").data.root == "/some/where"
    assert composed("predict").data.root == "/some/where"
    assert composed("train", "data.root=here").data.root == "here"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bogus": 1}, "bogus=1: unknown key, choose from augment, data, device, model"),
        ({"model": {"bogus": 1}}, "model.bogus=1: unknown key, choose from act, conv, head"),
        ({"model": {"act": "foo"}}, "model.act=foo: choose from relu, gelu, ncrelu"),
        ({"model": {"act": None}}, "model.act=null: choose from relu, gelu, ncrelu"),
        ({"model": 3}, "model=3: holds the keys act, conv, head"),
        ({"data": {"fallback": "kmnist"}}, "data.fallback=kmnist: choose from digits, null"),
        ({"data": {"root": " "}}, "data.root= : must be a path"),
        ({"optim": {"lr": -1.0}}, "optim.lr=-1: must be a number above 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr=nan: must be a number above 0"),
        ({"optim": {"lr": float("inf")}}, "optim.lr=inf: must be a number above 0"),
        ({"optim": {"lr": "big"}}, "optim.lr=big: must be a number above 0"),
        ({"optim": {"warmup": 1.0}}, "optim.warmup=1: must be a number above 0 and below 1"),
        ({"optim": {"label_smoothing": 1.0}}, "must be a number from 0 to below 1"),
        ({"trainer": {"epochs": 0}}, "trainer.epochs=0: must be an integer, at least 1, or null"),
        ({"trainer": {"batch_size": -3}}, "trainer.batch_size=-3: must be an integer"),
        ({"trainer": {"checkpoint_steps": 0}}, "must be an integer, at least 1, or null"),
        ({"trainer": {"compile": 1}}, "trainer.compile=1: choose from auto, true, false"),
        ({"trainer": {"compile": 0}}, "trainer.compile=0: choose from auto, true, false"),
        ({"seed": 2**32}, "seed=4294967296: must be an integer from 0 to 4294967295"),
        ({"device": "tpu"}, "device=tpu: choose from auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device=cuda:x: choose from auto, cpu, cuda, cuda:N"),
    ],
)
def test_what_is_not_allowed_is_named(values, message):
    with pytest.raises(UserError) as caught:
        from_mapping(TrainConfig, values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_allowed_values_are_kept():
    values = {
        "model": {"act": "ncrelu"},
        "data": {"fallback": None},
        "optim": {"lr": 0.5, "weight_decay": 0.0},
        "device": "cuda:3",
    }
    cfg = from_mapping(TrainConfig, values)
    assert cfg.model == ModelConfig(act="ncrelu")
    assert (cfg.data.fallback, cfg.optim.lr, cfg.device) == (None, 0.5, "cuda:3")
    assert from_mapping(TrainConfig, dataclasses.asdict(cfg)) == cfg


def test_every_key_says_what_it_may_be():
    def walk(schema, prefix=""):
        for item in dataclasses.fields(schema):
            assert allowed(TrainConfig, prefix + item.name)
            if dataclasses.is_dataclass(item.type):
                walk(item.type, f"{prefix}{item.name}.")

    walk(TrainConfig)


def test_the_command_line_answers_before_torch_is_loaded():
    heavy = "{'torch', 'torchvision', 'sklearn', 'onnx', 'onnxruntime', 'tensorboard'}"
    code = f"import sys, app.train, app.runs.compare; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
