"""No pickle is ever executed: a crafted file in place of any that is read ends in one line, or is never read."""

from trials.pickles import FORMS, OF_OTHERS, Crafted, pickle_trials
from trials.run import Run


def test_crafted_files_are_never_executed(run_trial, tmp_path):
    outcomes = run_trial(pickle_trials, Run(folder=tmp_path))
    assert len(outcomes) >= 3 * 8 + 1 + len(OF_OTHERS)
    assert [which for which, (executed, _, _) in outcomes.items() if executed] == []
    assert {which: words for which, (_, right, words) in outcomes.items() if not right} == {}


def test_the_crafted_files_would_execute(tmp_path):
    """Or the test above would prove nothing."""
    import pickle

    import torch

    for form, craft in FORMS.items():
        mark, path = tmp_path / form, tmp_path / f"{form}.bin"
        path.write_bytes(craft(mark))
        pickle.loads(path.read_bytes()) if form == "pickle" else torch.load(path, weights_only=False)
        assert mark.exists()
    assert Crafted
