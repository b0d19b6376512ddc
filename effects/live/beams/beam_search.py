"""A beam search's parameters and outputs. Names are vLLM's.

A search is a request of its own type: no token is sampled, so it has only those sampling
parameters that set its length.
"""

from typing import Any

from attrs import frozen

from minfer.effects.text.outputs import RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.request import SamplingParams
from minfer.sampling.beam import MAX_BEAMS, BeamSearch
from minfer.sampling.vllm_names import BEAMS, takes_neutral
from minfer.values.checks import ParameterError, check_number


@takes_neutral(BEAMS)
@frozen(kw_only=True)
class BeamSearchParams:
    """How to search. Raises ParameterError.

    Hypotheses are ranked by log-probability / length^`length_penalty`, where the length
    is that of the output, the token that ends it included. `early_stopping` is true (the
    search ends once there are `beam_width` hypotheses), false (once no beam's score is
    above the worst of theirs) or "never" (once no beam's score can become so), as in
    transformers.
    """

    beam_width: int
    max_tokens: int | None = 16  # of the output; None: as many as the context holds
    n: int | None = None  # sequences to return, the best first; None: `beam_width`
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __attrs_post_init__(self) -> None:
        check_number(self.beam_width, "beam_width", 1, MAX_BEAMS, whole=True)
        if self.n is not None and self.n > self.beam_width:
            raise ParameterError("n", f"must not exceed the {self.beam_width} beams")
        if self.max_tokens is not None:
            check_number(self.max_tokens, "max_tokens", 1, 2**31, whole=True)
        _ = self.search_params, self.sampling  # these check the other fields

    @property
    def search_params(self) -> BeamSearch:
        """The engine's parameters."""
        return BeamSearch(
            length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )

    @property
    def sampling(self) -> SamplingParams:
        """The parameters shared with requests that sample; `n` are the sequences
        returned.
        """
        return SamplingParams(
            temperature=0.0,
            n=self.beam_width if self.n is None else self.n,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


@frozen(kw_only=True)
class BeamSearchSequence:
    """One of the best sequences: a prompt, and what follows it."""

    tokens: list[int]  # prompt and output
    text: str  # of both
    cum_logprob: float | None  # natural, of the output; None if it failed
    finish_reason: str | None


@frozen(kw_only=True)
class BeamSearchOutput:
    """The results of a search."""

    sequences: list[BeamSearchSequence]  # the best first
    request: RequestOutput  # the same without the prompt, and the request's metrics

    @classmethod
    def of(cls, output: RequestOutput, tokenizer: Tokenizer | None) -> "BeamSearchOutput":
        """Returns the results of a request that has ended."""
        ids, prompt = output.prompt_ids, output.prompt
        if prompt is None:
            prompt = "" if tokenizer is None else tokenizer.decode(ids)
        sequences = [
            BeamSearchSequence(
                tokens=[*ids, *sample.token_ids],
                text=prompt + sample.text,
                cum_logprob=sample.cumulative_logprob,
                finish_reason=sample.finish_reason,
            )
            for sample in output.outputs
        ]
        return cls(sequences=sequences, request=output)


def searches_for(params: Any, count: int) -> list[BeamSearchParams]:
    """Returns one set of parameters for each of `count` prompts. Raises
    ParameterError.
    """
    all_params = [params] * count if isinstance(params, BeamSearchParams) else params
    if not isinstance(all_params, list | tuple) or len(all_params) != count:
        rule = "must be BeamSearchParams: one, or one for each prompt"
        raise ParameterError("params", rule)
    for search in all_params:
        if not isinstance(search, BeamSearchParams):
            raise ParameterError("params", "must be BeamSearchParams")
    return list(all_params)
