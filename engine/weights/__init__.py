"""Checkpoints: reading, checking, converting and folding them. Imports engine/steps and the
root."""
