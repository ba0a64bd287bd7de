"""Generated word problems in arithmetic, and the styles of their answers."""
