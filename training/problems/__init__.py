"""Word problems in arithmetic that are made, not collected, and the styles of their answers."""
