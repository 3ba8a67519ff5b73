"""The parts of benchmarks/frontier.py."""
