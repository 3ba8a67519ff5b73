"""Flags, launch, exact global batches, optimizers and the guard against losses that are not finite."""
