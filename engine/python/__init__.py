"""The Python API, `from srm import Engine`: an engine in the caller's own process."""
