"""The edge: connections, authentication, limits, retries and the request log."""
