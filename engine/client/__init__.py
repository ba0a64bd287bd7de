"""The client side of the engine: a connection to its process, and streams of tokens."""
