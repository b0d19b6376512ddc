"""A tiny model and the real engine around the torch executor, for the tests beside this.

The GPU's executor runs on a GPU if there is one, with CUDA graphs at depths other than 2.
Without a GPU its kernels' references run, and steps are padded as they are for graphs.
"""

import random
from typing import Any, Final

import pytest
import torch
from attrs import asdict, define, evolve, field, has
from torch import Tensor

from minfer.effects.execution.device import routes
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.live.engine.driver import Driver
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Finished, Submit
from minfer.records.request import Request, SamplingParams, row_sampling
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling import reference_sampler as sample

VOCAB: Final = 101
GREEDY: Final = SamplingParams(temperature=0)
CUDA: Final = torch.cuda.is_available()
Tokens = dict[tuple[str, int], list[int]]
REQUESTED: Final = (None, 0, 3, None, 20)  # how many log-probabilities, in turn
device_kinds: list[str] = []  # of the executor under test


def make_executor(
    config: EngineConfig,
    spec: ModelSpec,
    weights: Weights,
    draft: LoadedDraft | LoadedHead | None = None,
) -> TorchExecutor:
    if device_kinds[-1] == "cpu":
        return TorchExecutor(config, spec, weights, "cpu", draft=draft)
    graphs, device = config.depth != 2, "cuda" if CUDA else "cpu"
    executor = TorchExecutor(
        config, spec, weights, device, graphs=graphs, kernels=True, draft=draft
    )
    if graphs and not CUDA:
        runner = executor.runner
        runner.shortcuts.graphs = True
        # What would be captured.
        runner._replay = runner.step  # type: ignore[method-assign]
    return executor


@define
class Model:
    """One tiny model twice: in transformers and in minfer."""

    theirs: Any
    spec: ModelSpec
    weights: Weights

    def logits(self, tokens: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        row: list[float] = logits.tolist()
        return row

    def expected(self, request: Request, index: int = 0) -> list[int]:
        """One sample alone, by transformers' forward and the reference sampler."""
        tokens = list(request.prompt)
        out: list[int] = []
        while len(out) < request.max_tokens:
            logits = self.logits(tokens)
            sampling = row_sampling(request, index)
            token = sample.next_token(logits, sampling, tokens, len(request.prompt))
            tokens.append(token)
            out.append(token)
            if token in request.stop_ids:
                break
        return out


def requests(seed: int, count: int = 10) -> list[Request]:
    """Mixed lengths; half are greedy, some share a prefix, some stop at a token."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(21))
    made_requests = []
    for i in range(count):
        own_tokens = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 30)))
        sampling = SamplingParams(
            temperature=0.8,
            top_p=rng.choice([1.0, 0.9]),
            top_k=i % 3 * 10,
            min_p=i % 4 * 0.1,
        )
        made_requests.append(
            Request(
                id=f"r{i}",
                prompt=shared + own_tokens if i % 3 == 0 else own_tokens,
                max_tokens=rng.randrange(1, 26),
                stop_ids=frozenset({9, 41, 63}) if i % 4 == 0 else frozenset(),
                sampling=GREEDY if i % 2 else sampling,
                seed=rng.getrandbits(63),
            )
        )
    return made_requests


def on_device(weights: Weights) -> Weights:
    """Where the executor under test wants them."""
    if device_kinds[-1] == "cpu" or not CUDA:
        return weights

    moved_weights: Weights = carried_over(weights)
    return moved_weights


def draft_on_device(
    draft: LoadedDraft | LoadedHead | None,
) -> LoadedDraft | LoadedHead | None:
    """Likewise, a drafter, if there is one."""
    if isinstance(draft, LoadedHead):
        is_moved = device_kinds[-1] != "cpu" and CUDA
        return LoadedHead(carried_over(draft.weights)) if is_moved else draft
    if draft is None or not isinstance(draft.weights, Weights):
        return draft
    return evolve(draft, weights=on_device(draft.weights))


def carried_over(tree: Any) -> Any:
    """The same tree with its tensors on the GPU."""
    if isinstance(tree, Tensor):
        return tree.cuda()
    if isinstance(tree, tuple):
        return tuple(map(carried_over, tree))
    if has(type(tree)):
        members = asdict(tree, recurse=False)
        return type(tree)(
            **{name: carried_over(member) for name, member in members.items()}
        )
    return tree


@define
class Run:
    """A finished run: tokens, ends, and what was decided on the way."""

    config: EngineConfig
    driver: Driver
    tokens: Tokens = field(factory=dict)
    ends: dict[tuple[str, int], Finished] = field(factory=dict)
    reasons: list[object] = field(factory=list)
    scores: dict[tuple[str, int], list[TokenLogprobs]] = field(factory=dict)

    @classmethod
    def start(cls, model: Model, **settings: Any) -> "Run":
        """`draft`: a draft model; other settings are the configuration's."""
        draft: LoadedDraft | LoadedHead | None = settings.pop("draft", None)
        sizes: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 8,
            "max_model_len": 96,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "vocab_size": VOCAB,
        }
        config = EngineConfig(**{**sizes, **settings})
        draft = draft_on_device(draft)
        executor = make_executor(config, model.spec, on_device(model.weights), draft)
        return cls(config, Driver(config, executor))

    def turn(self) -> None:
        transition = self.driver.turn()
        self.reasons += transition.reasons
        for command in transition.commands:
            if isinstance(command, Emit):
                beside = command.logprobs or ((),) * len(command.ids)
                events = zip(command.ids, command.tokens, beside, strict=True)
                for name, tokens, scores in events:
                    self.tokens.setdefault(name, []).extend(tokens)
                    if scores:
                        assert len(scores) == len(tokens)
                        self.scores.setdefault(name, []).extend(scores)
                self.ends.update({(f.id, f.sample): f for f in command.finished})

    def serve(self, wanted_requests: list[Request], *, arrival_gap: int = 0) -> Tokens:
        """Serve to the end, submitting a request every `arrival_gap` turns."""
        for request in wanted_requests:
            self.driver.post(Submit(request))
            for _ in range(arrival_gap):
                self.turn()
        while self.driver.busy:
            self.turn()
        return self.tokens

    def count(self, kind: type) -> int:
        return sum(isinstance(reason, kind) for reason in self.reasons)


def serve_by_packages(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, flash_from: int
) -> None:
    """Have other packages serve a GPU's steps of any size, and chunks from some length
    on, whatever the device.
    """
    backend: Any = runner.backend
    monkeypatch.setattr(
        routes, "MIN_FLASH_TOKENS", dict.fromkeys(routes.MIN_FLASH_TOKENS, flash_from)
    )
    runner.captured = 0
    runner.backend = evolve(
        backend,
        routes=evolve(
            backend.routes,
            groups=tuple(evolve(group, no_flash="") for group in backend.routes.groups),
            captured=0,
            all_captured=False,
            no_quack="",
        ),
    )
    runner.step.routes = runner.backend.routes
    runner.shortcuts.flash = runner.backend.routes.uses_flash


def asking(wanted_requests: list[Request]) -> list[Request]:
    """Requests of which some ask for log-probabilities."""
    with_params = zip(wanted_requests, REQUESTED * len(wanted_requests), strict=False)
    return [evolve(r, sampling=evolve(r.sampling, logprobs=k)) for r, k in with_params]


def check_scores(model: Model, run: Run, wanted_requests: list[Request]) -> None:
    """Requests for them, and no others, got those of transformers: within 1e-4, in
    float32.
    """
    asking = {
        (r.id, i): r
        for r in wanted_requests
        for i in range(r.n)
        if r.sampling.logprobs is not None
    }
    assert run.scores.keys() == asking.keys()
    for name, request in asking.items():
        tokens, k = run.tokens[name], request.sampling.logprobs
        assert len(run.scores[name]) == len(tokens)
        for place, (token, report) in enumerate(
            zip(tokens, run.scores[name], strict=True)
        ):
            logits = model.logits([*request.prompt, *tokens[:place]])
            exact = torch.tensor(logits).double().log_softmax(0)
            likeliest = exact.argsort(descending=True).tolist()
            assert report.rank == likeliest.index(token) + 1
            assert report.likeliest == (*likeliest[:k],)
            close = torch.tensor([report.logprob, *report.logprobs]).double()
            right = exact[[token, *report.likeliest]]
            torch.testing.assert_close(close, right, rtol=0, atol=1e-4)
