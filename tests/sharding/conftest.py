"""The trainings of this folder are in ``small_runs.py``, where forked ranks find them by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import ``small_runs``
