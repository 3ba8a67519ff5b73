"""Hugging Face Accelerate training recipes that save memory: name what you have, get the fastest run that fits."""

__version__ = "0.1.0"
