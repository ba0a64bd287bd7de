"""Responses on the wire: requests, items, replies and events."""
