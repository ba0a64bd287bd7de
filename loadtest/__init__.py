"""Load from outside: speaks HTTP to any OpenAI-compatible server, and measures what comes back."""
