"""From one request to engine requests, and from their tokens to choices."""
