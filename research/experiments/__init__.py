"""The paper's experiments, redone small: `python -m experiments NAME`."""
