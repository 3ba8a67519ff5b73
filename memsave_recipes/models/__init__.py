"""Models that the recipes train, and weight files from disk, without pickle."""
