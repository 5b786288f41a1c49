"""Sequences: the package causal-conv1d as a peer, and models with depthwise convolutions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

CAUSAL = "causal-conv1d"  # the PyPI package: 2 to 4 taps, causal, SiLU
CAUSAL_TAPS = (2, 3, 4)
SHAPES = {"conformer": (1024, 512), "mamba": (2048, 1024)}  # T, features


def causal_conv1d() -> Callable[..., Tensor] | None:
    """Return the peer as a function of input, weight and bias; None if it is not installed."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    return lambda x, w, b: causal_conv1d_fn(x, w.squeeze(1), b, activation="silu")


class GatedBlock(nn.Module):
    """Mamba's block without the selective scan: projection, 4 causal taps, SiLU, gate, projection.

    Gu and Dao, arXiv 2312.00752; without the scan it is MambaOut's gated block, arXiv 2405.07992.
    """

    def __init__(self, features: int) -> None:
        """Create a block with twice as many channels in the convolution as `features`."""
        super().__init__()
        channels = 2 * features
        self.norm = nn.LayerNorm(features)
        self.in_projection = nn.Linear(features, 2 * channels)
        convolution = nn.Conv1d(channels, channels, 4, padding=3, groups=channels)
        self.convolution = nn.Sequential(convolution, nn.SiLU())
        self.out_projection = nn.Linear(channels, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + block(x), [N, T, features]."""
        y, gate = self.in_projection(self.norm(x)).chunk(2, -1)
        y = self.convolution(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out_projection(y * nn.functional.silu(gate))


class Conformer(nn.Module):
    """torchaudio's Conformer (Gulati et al., arXiv 2005.08100): 31 taps, batch normalisation."""

    def __init__(self, features: int, layers: int) -> None:
        """Create `layers` layers."""
        super().__init__()
        try:
            from torchaudio.models import Conformer as Layers
        except ImportError:
            raise SystemExit("this model needs torchaudio") from None
        self.layers = Layers(features, 8, 4 * features, layers, depthwise_conv_kernel_size=31)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers, [N, T, features]."""
        lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
        return self.layers(x, lengths)[0]


class Mean(nn.Module):
    """Mean over T."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of x [N, T, features] over T."""
        return x.mean(1)


def build(name: str, classes: int, layers: int = 4) -> nn.Module:
    """Return a classifier of sequences [N, T, features]; see SHAPES."""
    _, features = SHAPES[name]
    blocks = (
        [Conformer(features, layers)]
        if name == "conformer"
        else [GatedBlock(features) for _ in range(layers)]
    )
    return nn.Sequential(*blocks, Mean(), nn.Linear(features, classes))
