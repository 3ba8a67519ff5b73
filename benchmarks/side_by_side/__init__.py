"""The loops that peers.py compares, and what they train."""
