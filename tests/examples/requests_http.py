"""No SDK: one POST, and a stream of server-sent events, with requests."""

import json
import os

import requests

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")
REQUESTED = {"prompt": "class Stack:\n", "max_tokens": 96, "temperature": 0}

answer = requests.post(f"{SERVER}/v1/completions", json=REQUESTED, timeout=60)
answer.raise_for_status()
print(answer.json()["choices"][0]["text"])

refused = requests.post(f"{SERVER}/v1/completions", json={"prompt": 5}, timeout=60)
print(refused.status_code, refused.json()["error"]["message"])

streamed = {**REQUESTED, "stream": True}
with requests.post(
    f"{SERVER}/v1/completions", json=streamed, stream=True, timeout=60
) as events:
    for line in events.iter_lines(decode_unicode=True):
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            print(json.loads(data)["choices"][0]["text"], end="", flush=True)
print()
