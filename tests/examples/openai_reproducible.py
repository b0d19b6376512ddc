"""Prompts under test: greedy, or with a seed, they are answered alike each time.

In bfloat16, who else is in a batch may change last bits, and so a token: test alone, or
serve with `--dtype float32`.
"""

import os

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
    model = client.models.list().data[0].id

    def answer(question: str, temperature: float = 0, seed: int = 0) -> str:
        """What the model says to a question."""
        done = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=temperature,
            seed=seed,
            max_tokens=16,
        )
        return done.choices[0].message.content or ""

    size = answer("Return the size of a file.")
    assert size == answer("Return the size of a file.")
    assert size.startswith("def size("), size

    drawn = [answer("Open a file.", temperature=1, seed=seed) for seed in range(5)]
    again = [answer("Open a file.", temperature=1, seed=seed) for seed in range(5)]
    assert drawn == again, "the same seeds, and other answers"
    print(f"5 seeds, {len(set(drawn))} answers, each the same a second time")
