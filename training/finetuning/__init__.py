"""`srm train sft`: rows of prompts and completions, and the training on completions alone."""
