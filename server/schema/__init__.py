"""Shapes of requests and replies, and their validation. Imports the root of server/."""
