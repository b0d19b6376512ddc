"""KV blocks in host memory, under the device's pool, and their moves."""
