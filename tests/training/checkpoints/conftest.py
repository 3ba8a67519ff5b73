"""The trials of this folder are modules in ``trials/``; ``run_trial`` of ``tests/nursery.py`` runs them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import ``trials``
