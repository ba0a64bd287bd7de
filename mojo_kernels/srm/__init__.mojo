"""The ops of the SRM step graph. What each computes is in the docstring of its module."""
