"""The edge: connections, authentication, limits and the request log."""
