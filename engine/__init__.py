"""Tokens in, tokens out. No HTTP, no text, no torch."""
