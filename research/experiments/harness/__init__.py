"""Modules that the experiments share: they train models, cache results and write records."""
