"""Text as it comes, through OpenAI's SDK, and what it cost at the end."""

import os

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")

with (
    OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client,
    client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Write a Python function is_prime."}],
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream,
):
    for chunk in stream:  # leaving the loop early cancels the request
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")
