"""`srm loadtest run`, `sweep` and `offline`."""
