"""Bytes, seconds and FLOPs of training steps, measured as they run."""
