import pytest
import torch


@pytest.fixture(autouse=True)
def exact_cudnn():
    """Make cuDNN, the reference of convolutions on CUDA, deterministic and without TF32."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
