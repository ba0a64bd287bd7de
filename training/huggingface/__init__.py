"""Blocks of the model, and the model for `transformers`, in files that go beside a checkpoint."""
