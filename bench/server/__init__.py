"""The benchmark of HTTP, and the load that it and `bench.peers` send."""
