"""Decides which sequences run in the next step, without input or output. Imports engine/state."""
