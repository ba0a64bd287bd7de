"""The model for Hugging Face's `transformers`, which only this package's one module needs."""
