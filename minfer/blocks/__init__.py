"""The blocks of the KV cache: content keys, the prefix index, and who owns a block."""
