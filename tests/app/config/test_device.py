import pytest
import torch

from app.config.device import describe, pick_device
from app.config.errors import UserError


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("cuda:1") == torch.device("cuda:1")


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"=cuda: not on this machine, choose from auto, cpu$"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"choose from auto, cpu, cuda:0, cuda:1$"):
        pick_device("cuda:2")


def test_describe(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert describe(torch.device("cpu")) == "cpu, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert describe(torch.device("cpu")) == "cpu, 8 threads"
