"""Text: tokenizer, chat templates, assembly of outputs."""
