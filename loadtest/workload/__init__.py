"""Decides which requests are sent and when. Imports the root of loadtest/."""
