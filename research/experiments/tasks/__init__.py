"""What models of `coverage` learn and answer."""
