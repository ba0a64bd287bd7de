"""The routes that trainers know from vLLM and SGLang, on the one road for a token."""
