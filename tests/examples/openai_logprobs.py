"""How sure the model was: log-probabilities of each token and of what was as likely."""

import math
import os

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
    done = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        max_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    scores = done.choices[0].logprobs
    for token in scores.content or [] if scores else []:
        others = (
            f"{candidate.token!r} {math.exp(candidate.logprob):.0%}"
            for candidate in token.top_logprobs
        )
        print(f"{token.token!r:12} of", ", ".join(others))
