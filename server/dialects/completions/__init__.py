"""OpenAI completions, and the list of models."""
