"""What runs: LLM, AsyncLLM, the engine client, the driver, journal files, the edge."""
