"""A conversation through OpenAI's SDK: ask, and ask again with the answer in mind."""

import os

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
    model = client.models.list().data[0].id
    first = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        max_tokens=48,
        temperature=0,
    )
    print(first.choices[0].message.content)
    second = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": "What is 17 + 25?"},
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Add 5 to that."},
        ],
        max_tokens=48,
        temperature=0,
    )
    print(second.choices[0].message.content)
    print(second.usage)
