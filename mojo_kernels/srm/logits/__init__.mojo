"""Ops over rows of logits: edits, samples and scores, and how a row is held while it is summed."""
