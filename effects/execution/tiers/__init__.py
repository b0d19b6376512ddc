"""KV pages in host memory and in files, and their copies to and from the device."""
