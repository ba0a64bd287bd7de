"""What shows a training run while it goes on: a log, a page of curves, TensorBoard and W&B."""
