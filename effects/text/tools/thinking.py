"""Reasoning between two markers, before the answer: `<think>...</think>`.

Some templates open it already, so that the answer begins within; and some models open it
again then. An opening marker that is not at the beginning is text. A call within
reasoning does not count, unless nothing closes the reasoning: that shows at the end, and
reasoning from its marker on is kept until then.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    take_space,
    take_until,
)


@frozen
class Thinking:
    """The reasoning markers of a family of models."""

    opens: str
    closes: str
    around: tuple[str, ...] = ()  # markers beside answers, which are left out

    def read(
        self,
        source: StreamedText,
        out: DeltaWriter,
        *,
        opened: bool,
        calls: Sequence[str] = (),
    ) -> Reading[str]:
        """Take the reasoning, if there is any; the answer comes after it. Returns the
        text from a marker of `calls` within reasoning that nothing closed.
        """
        source.keep()
        yield from take_space(source)
        if (yield from peek_any(source, [self.opens])):
            source.take(len(self.opens))
        elif not opened or (self.around and (yield from peek_any(source, self.around))):
            out.content(source.take_kept())
            return ""
        source.take_kept()
        out.mark()
        marker = yield from take_until(source, [self.closes, *calls], out.reasoning)
        if marker not in calls:
            return ""
        unclosed = [marker]
        closes = yield from take_until(source, [self.closes], unclosed.append)
        if closes:
            out.reasoning("".join(unclosed))
        return "" if closes else "".join(unclosed)

    def open_at_end(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        return prompt.rstrip().endswith(self.opens)  # which has no white space at its end


THINK: Final = Thinking("<think>", "</think>")
BRACKETS: Final = Thinking("[THINK]", "[/THINK]")  # Mistral's
COHERE_AROUND: Final = (
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
KIMI_K3_AROUND: Final = (
    *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    *("<|close|>message<|sep|>", "<|end_of_msg|>"),
)
SOLAR_AROUND: Final = ("<|begin|>assistant", "<|content|>", "<|end|>")
_COHERE: Final = Thinking("<|START_THINKING|>", "<|END_THINKING|>", COHERE_AROUND)
_SEED: Final = Thinking("<seed:think>", "</seed:think>")
_GEMMA: Final = Thinking("<|channel>thought", "<channel|>")
_GRANITE: Final = Thinking("Here is my thought process:", "Here is my response:")
_MINIMAX_M3: Final = Thinking("<mm:think>", "</mm:think>")
_HY: Final = Thinking("<think:opensource>", "</think:opensource>")
_APRIEL: Final = Thinking(
    "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]",)
)
_KIMI_K3: Final = Thinking(
    "<|open|>think<|sep|>", "<|close|>think<|sep|>", KIMI_K3_AROUND
)
_SOLAR: Final = Thinking("<|think|>", "<|end|>", SOLAR_AROUND)
_ERNIE: Final = Thinking("<think>", "</think>", ("<response>", "</response>"))
_HUNYUAN: Final = Thinking("<think>", "</think>", ("<answer>", "</answer>"))
# Names are vLLM's; of those that mean the same, each has all.
REASONING: Final[Mapping[str, Thinking]] = {
    "think": THINK,
    "mistral": BRACKETS,
    "cohere": _COHERE,
    "seed_oss": _SEED,
    "gemma4": _GEMMA,
    "granite": _GRANITE,
    "minimax_m3": _MINIMAX_M3,
    "hy_v3": _HY,
    "apriel": _APRIEL,
    "kimi_k3": _KIMI_K3,
    "solar_open": _SOLAR,
    "ernie45": _ERNIE,
    "hunyuan_a13b": _HUNYUAN,
    **dict.fromkeys(("cohere_command3", "cohere_command4"), _COHERE),
    **dict.fromkeys(
        (
            *("qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47"),
            *("kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "step3", "step3p5"),
            *("holo2", "mimo", "poolside_v1"),
        ),
        THINK,
    ),
}
# Texts of chat templates that show a format, all of them together; the first one counts.
SIGNS: Final = (
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>thought",), "gemma4"),
    (("<mm:think>",), "minimax_m3"),
    (("<think{}>", ":opensource"), "hy_v3"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<|open|>", "'think'"), "kimi_k3"),
    (("<|think|><|end|>",), "solar_open"),
    (("Here is my response:",), "granite"),
    (("</think>", "<response></response>"), "ernie45"),
    (("</think>", "\\n<response>\\n"), "ernie45"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>",), "think"),
)
