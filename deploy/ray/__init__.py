"""`srm batch` over a Ray cluster, and the server as a Ray Serve application; the extra `ray`."""
