"""Peak rates of this machine: matrix products and memory."""
