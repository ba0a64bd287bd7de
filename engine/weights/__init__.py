"""Checkpoints: reading, checking, converting and folding them."""
