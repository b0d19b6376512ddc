"""Running engines: LLM, AsyncLLM, engine client, driver, journal files, input
processor.
"""
