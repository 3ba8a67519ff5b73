"""What the host waits for in a step of a run, on the stand-in for CUDA, which counts it where ``STANDIN_WAITS`` is set.

The step is the fourth: it is neither measured nor, by the flags of such runs, logged or saved.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.training.launch import distributed

STEP = 4


@contextmanager
def waits_of_a_step(found: dict[str, int]) -> Iterator[None]:
    """Note in ``found`` those of the run inside, which has to come to that step."""
    from cuda_standin.waits import waits

    steps, before, done = TrainingRun.steps, Counter[tuple[str, str]](), set()

    def counted(training):
        for number, batch in enumerate(steps(training), 1):
            yield batch
            done.add(number)
            if number == STEP - 1:
                before.update(waits)
            if number == STEP:
                found.update(by_line(waits - before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "POLL_EVERY_S", 1e6)  # a slow machine takes a second for a step, and asks after each
        patch.setattr(TrainingRun, "steps", counted)
        yield
    assert STEP in done


def by_line(counted: Counter[tuple[str, str]]) -> dict[str, int]:
    """Without the numbers of lines, which move."""
    found: Counter[str] = Counter()
    for (kind, where), count in counted.items():
        found[f"{kind}: {re.sub(r':[0-9]+', '', where)}"] += count
    return dict(found)
