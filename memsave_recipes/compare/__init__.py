"""Finished runs, read from their folders or from W&B, and compared."""
