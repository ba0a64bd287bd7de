"""Commands that need no server: `srm batch`, `generate`, `score`, and those of administrators."""
