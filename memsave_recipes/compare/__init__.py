"""Finished runs, read from their folders or from dashboards, side by side."""
