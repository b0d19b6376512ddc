"""An API server's end of its links: an `EngineClient` over one engine or several."""
