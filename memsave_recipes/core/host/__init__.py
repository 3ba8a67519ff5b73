"""Optimizers whose state, or whose whole step, is in the memory of the host."""
