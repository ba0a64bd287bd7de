"""The load tester: speaks HTTP to any OpenAI-compatible server, and measures the replies."""
