"""The tasks of `coverage`."""
