"""The router: which replica of the engine serves a request, as a pure function."""
