"""KV pages in host memory, and their copies to and from the device."""
