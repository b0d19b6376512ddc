"""NVIDIA GPUs: paged attention and logit changes by Triton kernels, and CUDA graphs."""
