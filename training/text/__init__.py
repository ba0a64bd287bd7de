"""From text on disk to batches of token ids: documents, token files, packed windows."""
