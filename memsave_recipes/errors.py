"""The one exception for a user's mistake: it becomes one line on the terminal and exit code 2.

The message names the input, the rule it broke and the way out, for example
``--global_batch_size 4 is smaller than the 8 ranks: raise it to at least 8 or launch fewer processes``.
Anything else that is raised is a defect of ours and keeps its traceback.
"""


class InputError(ValueError):
    """What the user asked for cannot be done; the message says what to change."""

    @property
    def one_line(self) -> str:
        """The message in one line, also of a data worker's error, which torch raises again with a traceback as text."""
        last_line = str(self).strip().splitlines()[-1]
        return last_line.removeprefix(f"{type(self).__module__}.{type(self).__name__}: ")

    @property
    def found_by_one_rank(self) -> bool:
        """Whether it comes from the data that one rank was reading, not from what all ranks were told."""
        return str(self).startswith("Caught ")
