"""`srm evaluate passk`: pass@k of the samples of any OpenAI-style server. Needs no torch."""
