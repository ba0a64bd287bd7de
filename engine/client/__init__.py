"""What other processes hold of the engine: a connection and streams of tokens."""
