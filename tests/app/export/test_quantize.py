import pytest
import torch

from app.export.quantize import equal_batches


@pytest.mark.parametrize("count", [1, 249, 250, 251, 300, 499, 500, 5000, 5003])
def test_calibration_batches_have_one_size_and_all_images(count):
    images = torch.arange(count)
    batches = list(equal_batches(images, 250))
    (size,) = {len(batch) for batch in batches}
    assert size <= 250
    assert torch.cat(batches).unique().tolist() == images.tolist()
    assert size * len(batches) < count + len(batches)  # few are repeated
