"""Text: tokenizer, chat templates, output processor."""
