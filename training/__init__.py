"""Gradients: the only package that imports torch."""
