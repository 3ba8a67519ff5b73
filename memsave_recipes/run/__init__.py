"""One run of a recipe: its folder, its figures, its trackers, and how it ends.

NOTE [ decisions ]
* JSON files are never half written, and a run folder is cleared only when everything before training has succeeded,
  so a mistake with ``--overwrite`` costs nothing.
"""
