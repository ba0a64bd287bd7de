"""Learning from rewarded completions by GRPO: sample, choose, update, and again."""
