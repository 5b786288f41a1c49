"""Data sets in memory, the order of their images, and what is done to them before the network."""
