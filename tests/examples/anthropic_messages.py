"""Anthropic's SDK against the same server: a message, whole and streamed."""

import os

from anthropic import Anthropic

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MINFER_MODEL", "bundled")

with Anthropic(base_url=SERVER, api_key="-") as client:
    message = client.messages.create(
        model=MODEL,
        max_tokens=32,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
    )
    for block in message.content:
        if block.type == "text":
            print(block.text)
    print(message.stop_reason, message.usage.output_tokens)

    with client.messages.stream(
        model=MODEL,
        max_tokens=32,
        messages=[{"role": "user", "content": "Sort 42, 7, 19, 3."}],
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()
