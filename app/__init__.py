"""Train, predict with and export a LeNet made of the operators in `ops`."""
