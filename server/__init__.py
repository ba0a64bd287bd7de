"""Text and HTTP. Never imports max, torch or engine internals."""
