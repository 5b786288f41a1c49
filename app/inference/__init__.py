"""Inference: images to predictions, metrics and plots."""
