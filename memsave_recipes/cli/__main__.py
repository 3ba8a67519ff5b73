"""``python -m memsave_recipes.cli``."""

import sys

from memsave_recipes.cli import main

sys.exit(main())
