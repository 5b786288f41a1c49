"""The project's networks without its operators: what one has who does not install them."""

import torch
from torch import Tensor, nn

from ops import GELU, DepthwiseConv2d, NCReLU


class StockGELU(nn.Module):
    """QuickGELU, as models write it without an operator of their own."""

    def forward(self, input: Tensor) -> Tensor:
        """See GELU."""
        return input * torch.sigmoid(1.702 * input)


class StockNCReLU(nn.Module):
    """NCReLU of torch's operators."""

    def forward(self, input: Tensor) -> Tensor:
        """See NCReLU."""
        return torch.cat((input.clamp(min=0), input.clamp(max=0)), 1)


def with_stock_layers(module: nn.Module) -> nn.Module:
    """The same network with torch's layers in the place of ours; the weights are shared."""
    for name, child in module.named_children():
        if isinstance(child, GELU):
            setattr(module, name, StockGELU())
        elif isinstance(child, NCReLU):
            setattr(module, name, StockNCReLU())
        elif isinstance(child, DepthwiseConv2d):
            size, channels = child.kernel_size, child.channels
            stock = nn.Conv2d(
                channels, channels, size, child.stride, child.padding, groups=channels, bias=False
            )
            stock.load_state_dict(child.state_dict())
            setattr(module, name, stock)
        else:
            with_stock_layers(child)
    return module
