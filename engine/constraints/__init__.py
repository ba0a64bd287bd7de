"""What may be sampled: grammars of schemas, regexes and choices, and how far each sequence is."""
