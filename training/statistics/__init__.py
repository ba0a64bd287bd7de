"""Statistics of samples that are right or wrong: pass@k, its intervals, its power law."""
