"""Trained networks in use: from images to predictions, metrics and pictures."""
