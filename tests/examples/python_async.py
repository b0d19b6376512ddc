"""Streams side by side in an event loop, and one that is cancelled by leaving it."""

import asyncio

from minfer import AsyncLLM, RequestOutputKind, SamplingParams


async def main() -> None:
    """Write two texts at once, then begin a third and leave it."""
    async with AsyncLLM() as llm:

        async def written(prompt: str) -> str:
            params = SamplingParams(temperature=0, max_tokens=96)
            async for output in llm.generate(prompt, params):
                text = output.outputs[0].text  # all of it so far
            return prompt + text

        for text in await asyncio.gather(
            written("def gcd(a, b):\n"), written("class Queue:\n")
        ):
            print(text, "\n")

        endless = SamplingParams(
            max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for news in llm.generate("import os\n", endless):  # what is new alone
            print("left after", repr(news.outputs[0].text))
            break


asyncio.run(main())
