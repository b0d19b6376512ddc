"""litellm: minfer as one more provider, behind litellm's single function."""

import os
from typing import Any

# Else it asks a server of its makers for prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MINFER_MODEL", "bundled")
requested: dict[str, Any] = {
    "model": f"hosted_vllm/{MODEL}",  # a server that speaks as vLLM's does
    "api_base": f"{SERVER}/v1",
    "messages": [{"role": "user", "content": "Sort 42, 7, 19, 3."}],
    "max_tokens": 32,
    "temperature": 0,
}

whole = litellm.completion(**requested)
print(whole.choices[0].message.content, whole.usage.completion_tokens, "tokens")
for chunk in litellm.completion(**requested, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
