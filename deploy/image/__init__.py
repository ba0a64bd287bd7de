"""The container image: what its build installs, and the check of what is built."""
