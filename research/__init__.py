"""What is measured and tried: benchmarks, the paper's experiments, and the records of both."""
