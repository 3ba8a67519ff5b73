"""One run of a recipe: its folder, its figures, its trackers, and how it ends."""
