import pytest
import torch


@pytest.fixture(autouse=True)
def exact_cudnn():
    """Make cuDNN, the convolution of conv2d_max_pool2d on CUDA, deterministic and without TF32."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
