"""Reads GGUF, llama.cpp's file format: a whole model in one file.

The rest of minfer reads a GGUF file as the Hugging Face checkpoint that it was made from:
config.py turns the metadata into a config.json, and hf_tensors.py maps the tensors to the
names and shapes in that checkpoint's safetensors files. The tokenizer in the metadata is
built in effects/text/gguf_tokenizer.py.

Source: the format's specification, docs/gguf.md of ggml.
"""
