"""The kit for GPU machines without MAX: see README.md beside this file."""
