"""Converted torchvision networks in two runtimes."""

import copy

import numpy as np
import pytest
import torch
from torchvision import models

from ops import convert_depthwise
from ops.export import export_onnx
from tests.runtimes.runtimes import MissingError, onnx_runtime, openvino

NETWORKS = ["mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5"]


@pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_converted_torchvision_networks_keep_their_logits(name, tmp_path):
    torch.manual_seed(0)
    original = models.get_model(name, weights=None).eval()
    images = torch.randn(4, 3, 96, 96)
    with torch.no_grad():
        for module in original.modules():  # non-trivial batch norms, as after training
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.8, 1.2)
        expected = original(images).numpy()
    network = copy.deepcopy(original)
    assert convert_depthwise(network) >= 5
    for layout, runtime in (("function", onnx_runtime), ("standard", openvino)):
        path = tmp_path / f"{layout}.onnx"
        axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
        model = export_onnx(
            network,
            (images[:2],),
            layout=layout,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes=axes,
        )
        assert not model.functions  # as the original network
        path.write_bytes(model.SerializeToString())
        try:
            logits = runtime(path)(images.numpy())
        except MissingError as error:
            pytest.skip(str(error))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(logits, expected, atol=1e-4 * max(1, scale), rtol=0)
