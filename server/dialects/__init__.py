"""The dialects in which requests come: of each its requests, replies, formats and endpoint."""
