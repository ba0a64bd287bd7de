"""Computes measures from a recording. Imports the root of loadtest/."""
