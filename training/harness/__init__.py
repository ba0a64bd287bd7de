"""`srm evaluate harness`: benchmarks of lm-evaluation-harness, one process for each task."""
