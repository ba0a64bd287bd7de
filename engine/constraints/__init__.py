"""Constraints on what may be sampled: grammars, and where each sequence stands in its own."""
