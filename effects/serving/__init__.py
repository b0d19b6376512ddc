"""HTTP: transports, one module a protocol, metrics."""
