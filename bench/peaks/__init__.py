"""Rates that this machine reaches: matrix products and memory."""
