"""Custom operators in C++ and CUDA, with the gradients and modules that go with them."""

from ops.core import library

library.load()  # registers torch.ops.lenet_ops, which the modules below use

from ops.batch_norm_act2d import BatchNormAct2d, batch_norm_act2d  # noqa: E402
from ops.convert import convert_batch_norm, convert_depthwise, restore  # noqa: E402
from ops.depthwise_conv1d import DepthwiseConv1d, depthwise_conv1d  # noqa: E402
from ops.depthwise_conv2d import DepthwiseConv2d, depthwise_conv2d  # noqa: E402
from ops.exp import Exp, exp  # noqa: E402
from ops.gelu import GELU, gelu  # noqa: E402
from ops.global_avg_pool2d import GlobalAvgPool2d, global_avg_pool2d  # noqa: E402
from ops.involution2d import Involution2d, involution2d  # noqa: E402
from ops.lltm import LLTM, LLTMCell, lltm, lltm_cell  # noqa: E402
from ops.max_pool2d import MaxPool2d, max_pool2d  # noqa: E402
from ops.ncrelu import NCReLU, ncrelu  # noqa: E402

__all__ = [
    "GELU",
    "LLTM",
    "BatchNormAct2d",
    "DepthwiseConv1d",
    "DepthwiseConv2d",
    "Exp",
    "GlobalAvgPool2d",
    "Involution2d",
    "LLTMCell",
    "MaxPool2d",
    "NCReLU",
    "batch_norm_act2d",
    "convert_batch_norm",
    "convert_depthwise",
    "depthwise_conv1d",
    "depthwise_conv2d",
    "exp",
    "gelu",
    "global_avg_pool2d",
    "involution2d",
    "lltm",
    "lltm_cell",
    "max_pool2d",
    "ncrelu",
    "restore",
]
