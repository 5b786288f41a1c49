"""Training: the step, the loop, and the state to resume from."""
