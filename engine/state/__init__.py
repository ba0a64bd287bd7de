"""The state of every slot, sequence and share. Imports engine/steps and the root."""
