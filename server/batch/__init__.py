"""The process that runs batches, and the lines of one batch."""
