"""Many prompts in Python, without a server: one call, one batch, and how it went."""

from minfer import LLM, SamplingParams

STARTS = ("is_prime(n)", "gcd(a, b)", "factorial(n)", "reverse_string(text)")
PROMPTS = [f"def {start}:\n" for start in STARTS]

with LLM() as llm:  # or LLM("path/to/checkpoint"), or LLM("org/name")
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=96, n=2, seed=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for sample in output.outputs:
            print(prompt + sample.text)
        print(f"-- first token after {output.metrics.ttft or 0:.3f} s")
