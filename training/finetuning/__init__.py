"""`srm train sft`: reads rows of prompts and completions, and trains on the completions alone."""
