"""Models: what they are, their weights, and their checkpoints.

    architecture/   a model's spec, its layers, and the forward pass
    layout/         sizes of memory and steps, cache pages, each rank's part of a tensor
    checkpoint/     finds, checks, loads, quantizes and writes weight files
    fallback/       models outside the family table: transformers' own classes
    formats/        how published checkpoints store quantized matrices
    gguf/           reads GGUF files as the Hugging Face checkpoints they are made from

families/ is the table of supported architectures; fields.py lists which fields of a
config.json are refused; config_reader.py reads typed values from it. parts.py describes
a checkpoint's tensors as parts of the weights, ranks.py what ranks share and exchange.
"""
