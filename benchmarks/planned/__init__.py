"""What the benchmarks of the planner are run on."""
