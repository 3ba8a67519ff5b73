"""Every claim of the README on the GPUs of this machine, one after the other: ``benchmarks/gpu_day.sh``."""
