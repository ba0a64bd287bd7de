"""Tokens to text and back, and chat templates. Imports server/schema."""
