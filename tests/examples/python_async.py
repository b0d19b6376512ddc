"""Streams side by side in an event loop, and one that is cancelled by leaving it."""

import asyncio

from minfer import AsyncLLM, SamplingParams


async def main() -> None:
    """Write two texts at once, then begin a third and leave it."""
    async with AsyncLLM() as llm:

        async def written(prompt: str) -> str:
            params = SamplingParams(temperature=0, max_tokens=96)
            texts = [news.outputs[0].text async for news in llm.generate(prompt, params)]
            return prompt + "".join(texts)

        for text in await asyncio.gather(
            written("def gcd(a, b):\n"), written("class Queue:\n")
        ):
            print(text, "\n")

        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        async for news in llm.generate("import os\n", endless):
            print("left after", repr(news.outputs[0].text))
            break


asyncio.run(main())
