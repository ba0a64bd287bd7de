"""Files and batches on disk. Imports server/http."""
