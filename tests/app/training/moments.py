"""Callbacks before or after a training step."""

import itertools

from app.training.step import TrainStep


def before_step(monkeypatch, number, action):
    """Call `action(train_step)` before step `number`, counted from 0."""
    _patch(monkeypatch, number, action, before=True)


def after_step(monkeypatch, number, action):
    """Call `action(train_step)` after step `number`, counted from 0."""
    _patch(monkeypatch, number, action, before=False)


def _patch(monkeypatch, number, action, before):
    take, calls = TrainStep.take, itertools.count()

    def patched(train_step):
        due = next(calls) == number
        if due and before:
            action(train_step)
        take(train_step)
        if due and not before:
            action(train_step)

    monkeypatch.setattr(TrainStep, "take", patched)
