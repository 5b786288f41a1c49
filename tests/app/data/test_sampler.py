import torch

from app.config.schema import AugmentConfig
from app.data.sampler import plan_epoch

AUGMENT = AugmentConfig(rotation=10, shift=2)


def plan(seed=0, epoch=0, augment=AUGMENT, share=(0, 1)):
    return plan_epoch(seed, epoch, 230, 32, augment, share)


def test_plan_depends_on_seed_and_epoch():
    first = plan()
    assert first.batches.shape == (7, 32)
    assert first.maps.shape == (7, 32, 2, 3)
    assert len(first.batches.unique()) == 7 * 32  # each image once
    again = plan()
    assert torch.equal(first.batches, again.batches)
    assert torch.equal(first.maps, again.maps)
    for other in (plan(epoch=1), plan(seed=1)):
        assert not torch.equal(first.batches, other.batches)
        assert not torch.equal(first.maps, other.maps)


def test_seed_and_epoch_are_not_interchangeable():
    one, other = plan(seed=0, epoch=1), plan(seed=1, epoch=0)
    assert not torch.equal(one.batches, other.batches)
    assert not torch.equal(one.maps, other.maps)


def test_augmentation_does_not_change_the_order():
    bare = plan(augment=None)
    assert bare.maps is None
    assert torch.equal(bare.batches, plan().batches)


def test_processes_share_each_batch():
    whole, parts = plan(), [plan(share=(rank, 2)) for rank in range(2)]
    assert all(part.batches.shape == (7, 16) for part in parts)
    merged = torch.stack([part.batches for part in parts], 2).flatten(1)
    assert torch.equal(merged, whole.batches)
    maps = torch.stack([part.maps for part in parts], 2).flatten(1, 2)
    assert torch.equal(maps, whole.maps)
