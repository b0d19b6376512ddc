"""Many requests at once, through OpenAI's async SDK: the server batches them."""

import asyncio
import os

from openai import AsyncOpenAI

SERVER = os.environ.get("MINFER_URL", "http://127.0.0.1:8000")
STARTS = ("is_prime(n)", "gcd(a, b)", "factorial(n)", "reverse_string(text)")
PROMPTS = [f"def {start}:\n" for start in STARTS]


async def main() -> None:
    """Ask for all of them, and print them in the order in which they were asked."""
    async with AsyncOpenAI(base_url=f"{SERVER}/v1", api_key="-") as client:
        model = (await client.models.list()).data[0].id

        async def completed(prompt: str) -> str:
            completion = await client.completions.create(
                model=model, prompt=prompt, max_tokens=96, temperature=0
            )
            return prompt + completion.choices[0].text

        for text in await asyncio.gather(*map(completed, PROMPTS)):
            print(text, "\n")


asyncio.run(main())
