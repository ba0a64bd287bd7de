"""Matrix products: on a CPU (`linear.mojo`), on an H100 or H200 (`sm90.mojo`), and of any shape on a GPU (`plain.mojo`)."""
