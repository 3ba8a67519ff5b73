"""The parts of benchmarks/results_table.py."""
