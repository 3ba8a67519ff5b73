"""``python -m memsave_recipes.tools.cli``."""

import sys

from memsave_recipes.tools.cli import main

sys.exit(main())
