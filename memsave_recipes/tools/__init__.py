"""The ``memsave`` command, its pages and pictures, comparisons, and predictions of saved models."""
