"""The processes of a run, launcher, ranks and data workers: none is left behind, and none waits for ever."""
