"""Networks: LeNet, SeparableNet (depthwise separable convolutions), LLTM classifier."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from app.config.schema import LeNetConfig, LLTMConfig, ModelConfig, SeparableConfig
from ops import (
    GELU,
    LLTM,
    DepthwiseConv2d,
    GlobalAvgPool2d,
    Involution2d,
    MaxPool2d,
    NCReLU,
    depthwise_conv2d,
)

MIN_SIDE = 12  # of an image; smaller ones have no pixel after the last pooling
HIDDEN_SIZE = 128  # features of the LLTM
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": GELU, "ncrelu": NCReLU}


class ConvNet(nn.Module):
    """A network of two parts, `features` and `classifier`."""

    features: nn.Sequential
    classifier: nn.Sequential

    def forward(self, input: Tensor) -> Tensor:
        """Map normalised images float [N, 1, H, W] to logits [N, num_classes]."""
        return self.classifier(self.features(input))


class LeNet(ConvNet):
    """LeNet-5 (LeCun et al., 1998) for 28x28 images, with a choice of activation and convolution.

    Pooling comes before the activation, which then has a quarter of the work; for ReLU and NCReLU
    (monotone) the result is the same.

    - `act="ncrelu"` doubles the channels.
    - `conv="depthwise"`: a depthwise convolution, then a pointwise 1x1 that mixes the channels.
    - `conv="involution"`: a pointwise 1x1, then an involution (Li et al., arXiv 2103.06255). It
      keeps the size: 7x7 pixels remain instead of 5x5.
    - `head="gap"`: convolutions to a map per class, whose mean is the logit (Lin et al., Network In
      Network, arXiv 1312.4400). Images may have any height and width from 12 on.
    """

    def __init__(self, cfg: LeNetConfig, num_classes: int) -> None:
        super().__init__()
        act, widen = ACTIVATIONS[cfg.act], 2 if cfg.act == "ncrelu" else 1
        side = 7 if cfg.conv == "involution" else 5
        self.features = nn.Sequential(
            _conv(cfg.conv, 1, 6, 5, padding=2),
            MaxPool2d(2),
            act(),
            _conv(cfg.conv, 6 * widen, 16, 5, padding=0),
            MaxPool2d(2),
            act(),
        )
        if cfg.head == "gap":
            self.classifier = nn.Sequential(
                _conv(cfg.conv, 16 * widen, 120, 3, padding=1),
                act(),
                nn.Conv2d(120 * widen, num_classes, 1),
                GlobalAvgPool2d(),
                nn.Flatten(),
            )
            return
        self.features.append(nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(16 * widen * side**2, 120),
            act(),
            nn.Linear(120 * widen, 84),
            act(),
            nn.Linear(84 * widen, num_classes),
        )


class SeparableNet(ConvNet):
    """A fully convolutional network of depthwise separable convolutions, for images of any size.

    `channels` has the output channels of each convolution, in three stages with 2x2 max pooling
    between them. The first convolution is standard. The first of stage 1 and of stage 2 is 5x5, all
    others are 3x3; the last has no padding.
    """

    def __init__(self, channels: Sequence[Sequence[int]], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 1
        for stage, widths in enumerate(channels):
            for index, outputs in enumerate(widths):
                conv = "depthwise" if layers else "standard"
                kernel = 5 if index == 0 and stage < 2 else 3
                is_last = stage == 2 and index == len(widths) - 1
                padding = 0 if is_last else kernel // 2
                layers += [_conv(conv, inputs, outputs, kernel, padding), GELU()]
                inputs = outputs
            if stage < 2:
                layers.insert(-1, MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Conv2d(inputs, num_classes, 1), GlobalAvgPool2d(), nn.Flatten()
        )


class LLTMClassifier(nn.Module):
    """An LLTM over the rows of an image, and a linear layer on its last state."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.rows = LLTM(28, HIDDEN_SIZE, batch_first=True)
        self.classifier = nn.Linear(HIDDEN_SIZE, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map normalised images float [N, 1, 28, 28] to logits [N, num_classes]."""
        _, (h, _) = self.rows(input.squeeze(1))
        return self.classifier(h)


def build_model(cfg: ModelConfig, num_classes: int) -> nn.Module:
    """Build a network with random weights: float32 [N, 1, 28, 28] to logits [N, num_classes]."""
    if isinstance(cfg, LLTMConfig):
        return LLTMClassifier(num_classes)
    if isinstance(cfg, SeparableConfig):
        return SeparableNet(cfg.channels, num_classes)
    return LeNet(cfg, num_classes)


def takes_any_size(cfg: ModelConfig) -> bool:
    """Return whether the network takes images of any size from `MIN_SIDE` on."""
    return isinstance(cfg, SeparableConfig) or (isinstance(cfg, LeNetConfig) and cfg.head == "gap")


def cpu_format(cfg: ModelConfig) -> torch.memory_format:
    """Return the memory format in which the network trains faster on a CPU: up to a quarter."""
    plain = isinstance(cfg, LeNetConfig) and cfg.conv == "standard" and cfg.head == "fc"
    contiguous = plain or isinstance(cfg, LLTMConfig)
    return torch.contiguous_format if contiguous else torch.channels_last


def describe_model(cfg: ModelConfig) -> str:
    """Describe the network in a few words."""
    if isinstance(cfg, LLTMConfig):
        return f"LLTM of {HIDDEN_SIZE} features over an image's rows"
    if isinstance(cfg, SeparableConfig):
        count = sum(map(len, cfg.channels))
        return f"{count} convolutions, depthwise separable after the first, with gelu"
    pooled = " and global average pooling" if cfg.head == "gap" else ""
    return f"LeNet with {cfg.act}{',' if pooled else ' and'} {cfg.conv} convolutions{pooled}"


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable scalars."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class OneChannelConv2d(nn.Conv2d):
    """nn.Conv2d of one input channel that trains by `depthwise_conv2d` of copies, which are a view.

    cuDNN's deterministic weight gradient takes 20 times as long, oneDNN 1.5 times.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map float [N, 1, H, W] to [N, out_channels, ...]."""
        if not self.training:
            return super().forward(input)
        copies = input.expand(-1, self.out_channels, -1, -1)
        padding = cast(tuple[int, int], self.padding)
        return depthwise_conv2d(copies, self.weight, self.bias, padding=padding)


def _conv(conv: str, in_channels: int, out_channels: int, kernel: int, padding: int) -> nn.Module:
    layer = OneChannelConv2d if in_channels == 1 else nn.Conv2d
    if conv == "standard":
        return layer(in_channels, out_channels, kernel, padding=padding)
    if conv == "involution":
        pointwise, half = layer(in_channels, out_channels, 1), out_channels // 2
        spatial = Involution2d(out_channels, kernel, group_channels=half, reduction_ratio=2)
        return nn.Sequential(pointwise, spatial)
    depthwise = DepthwiseConv2d(in_channels, kernel, padding=padding, bias=False)
    return nn.Sequential(depthwise, layer(in_channels, out_channels, 1))  # the 1x1 has the bias
