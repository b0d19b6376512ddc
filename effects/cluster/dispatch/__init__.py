"""Which engine, or which server behind a proxy, gets a request, and when."""
