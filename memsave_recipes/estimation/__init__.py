"""Estimate the block costs of a step on a device that need not be here: fake tensors and a roofline."""
