"""OpenAI chats, their tools, and what tokenizes them."""
