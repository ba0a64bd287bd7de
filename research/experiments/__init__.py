"""The paper's experiments, redone small: `python -m research.experiments NAME`."""
