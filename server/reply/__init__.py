"""Replies as bytes: whole, and as events of a stream."""
