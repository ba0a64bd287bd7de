"""Tools that run beside the server: compilers of graphs for other machines."""
