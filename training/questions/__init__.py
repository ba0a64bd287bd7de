"""Questions with known answers, and rewards of completions: what pass@k and GRPO share."""
