"""Prompts under test: greedy, or with a seed, they are answered alike each time.

In bfloat16, who else is in a batch may change last bits, and so a token: test alone, or
serve with `--dtype float32`.
"""

import os

from openai import OpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
    model = client.models.list().data[0].id

    def answer(question: str) -> str:
        """What the model says to a question, greedily."""
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=16,
        )
        return completion.choices[0].message.content or ""

    def drawn(seed: int) -> str:
        """How a text goes on by chance, but by that of its seed alone."""
        completion = client.completions.create(
            model=model, prompt="class ", temperature=1, seed=seed, max_tokens=16
        )
        return completion.choices[0].text

    total = answer("What is 17 + 25?")
    assert total == answer("What is 17 + 25?")
    assert total.endswith("42"), total

    texts = [drawn(seed) for seed in range(5)]
    assert texts == [drawn(seed) for seed in range(5)], "the same seeds, and other texts"
    print(f"5 seeds, {len(set(texts))} texts, each the same a second time")
