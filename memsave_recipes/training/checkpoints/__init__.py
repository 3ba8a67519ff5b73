"""Checkpoints that are whole or not there, resume, and the lock that allows one run a folder."""

from memsave_recipes.training.checkpoints.saver import Checkpoints, Resumed, RunLock, locked_run_folder
from memsave_recipes.training.checkpoints.state import TrainState
from memsave_recipes.training.launch.processes import StoppedBySignal, StopSignals

__all__ = [
    "Checkpoints",
    "Resumed",
    "RunLock",
    "StopSignals",
    "StoppedBySignal",
    "TrainState",
    "locked_run_folder",
]
