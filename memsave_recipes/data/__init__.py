"""Data sets: images and their augmentation, documents as tokens, labelled texts."""
