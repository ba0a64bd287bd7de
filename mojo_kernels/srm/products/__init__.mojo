"""Matrix products: on a CPU (`linear.mojo`), and on an H100 or H200 (`sm90.mojo`, `linalg_sm90.mojo`)."""
