"""Metrics as ``evaluate`` modules of our own, so that they load from here and not from the Hub."""

from pathlib import Path

ACCURACY = Path(__file__).with_name("accuracy.py")
F1 = Path(__file__).with_name("f1.py")

__all__ = ["ACCURACY", "F1"]
