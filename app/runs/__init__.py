"""Run folders: checkpoints, curves, comparison of runs."""
