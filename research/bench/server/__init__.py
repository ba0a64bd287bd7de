"""The benchmark of HTTP, and the load that it and `research.bench.peers` send."""
