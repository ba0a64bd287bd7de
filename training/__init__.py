"""Training and evaluation: the only package that imports torch."""
