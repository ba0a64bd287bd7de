"""One file for each group of routes, and the application that joins them."""
