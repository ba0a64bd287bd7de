"""The model in PyTorch, for devices that the step graphs of MAX do not serve."""
