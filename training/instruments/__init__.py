"""Writers of a training run's values: a log, a page of curves, TensorBoard and W&B."""
