"""Two fingerprints are the same, or say where they part, whatever the number of samples."""

import numpy as np
import pytest

from memsave_recipes.data import fingerprint
from memsave_recipes.data.fingerprint import Fingerprint, Samples


def samples(digests):
    return Samples(digests=np.asarray(digests, dtype=np.int64), name_of=lambda index: f"file {index}")


def test_the_same_samples_do_not_differ():
    assert samples(range(9)).difference(samples(range(9)).record()) is None


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ([0, 1, 9, 3], "the first that differs is file 2"),
        ([0, 1, 3], "4 were and 3 are, the first that differs is file 2"),
        ([0, 1, 2], "4 were and 3 are"),
        ([0, 1, 2, 3, 4], "4 were and 5 are, the first that differs is file 4"),
    ],
)
def test_the_first_that_differs_is_named(now, words):
    assert samples(now).difference(samples(range(4)).record()) == words


def test_many_samples_share_digests(monkeypatch):
    monkeypatch.setattr(fingerprint, "MAX_DIGESTS", 4)
    was, now = np.arange(10), np.arange(10)
    now[7] = 99
    record = samples(was).record()
    assert len(record["digests"]) <= 4
    assert samples(was).difference(record) is None
    assert samples(now).difference(record) == "the first that differs is among the 3 from file 6 on"
    assert samples(range(13)).difference(record) == "10 were and 13 are"


def test_names_samples_and_the_tokenizer_are_compared():
    def make(names=("a", "b"), count=3, **changes):
        parts = {"samples": {"images": samples(range(count))}, "label_names": names}
        return Fingerprint(**{**parts, **changes})

    record = make().record()
    assert make().differences(record) == []
    assert make(names=("b", "a")).differences(record) == ["class names: in another order"]
    assert make(names=("b", "c")).differences(record) == ["class names: a gone, c new"]
    assert make(count=2).differences(record) == ["images: 3 were and 2 are"]
    assert Fingerprint(samples={}, label_names=("a", "b")).differences(record) == []
    assert make(tokenizer="x").differences(record) == ["the tokenizer is another one"]
