"""The Python API, `from engine import Engine`: an engine in the caller's own process."""
