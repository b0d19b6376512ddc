"""A checkpoint's files: what they hold, and how their tensors become weights.

hub.py                  downloads a checkpoint by its name
weight_files.py         finds the file of each tensor
tensor_names.py         the model's names of a checkpoint's tensors
checkpoint.py           reads config.json; checks tensors and loads them as weights
stream_weights.py       reads tensors to a GPU at the speed of the disk
random_weights.py       random weights instead of a checkpoint's
stored_matrices.py      which matrices the files leave unquantized
quantize_checkpoint.py  writes a quantized checkpoint (`minfer quantize`)
write_safetensors.py    writes safetensors files
"""
