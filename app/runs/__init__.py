"""Run folders on disk: checkpoints, curves, and the comparison of runs."""
