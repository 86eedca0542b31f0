"""Text in and out: tokenizers, chat templates, prompts as tokens, and answers as text."""
