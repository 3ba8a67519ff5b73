"""The trainings of this folder, where forked ranks find them by name: ``small_runs.py`` and ``fake_ranks.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import them
