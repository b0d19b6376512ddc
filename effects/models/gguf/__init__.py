"""Reads GGUF, llama.cpp's file format: a whole model in one file.

The file is shown as the Hugging Face checkpoint that it was made from: its metadata as a
config.json (config.py), its tensors under the names, and in the forms, of safetensors
files (tensors.py). All else of minfer reads it as any other checkpoint. The tokenizer in
the metadata is built in effects/text/gguf_tokenizer.py.

Source: the format's specification, docs/gguf.md of ggml.
"""
