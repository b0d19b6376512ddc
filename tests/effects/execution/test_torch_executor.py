"""The torch executors, run by the real engine: the same tokens as transformers, whatever
is set.

The GPU's executor runs on a GPU if there is one, with CUDA graphs at depths other than 2.
Without a GPU its kernels' references run, and steps are padded as they are for graphs.
"""

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import asdict, define, evolve, field, has
from torch import Tensor

from minfer import sample
from minfer.config import EngineConfig
from minfer.effects.execution import cuda_attention, torch_executor
from minfer.effects.execution.attention import KVCache
from minfer.effects.execution.cuda_attention import CudaCache
from minfer.effects.execution.device_rows import DeviceRows
from minfer.effects.execution.executor import LogitsError
from minfer.effects.execution.graphs import GraphCache
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.torch_executor import GRAPHS, Flight, TorchExecutor
from minfer.effects.live.driver import Driver
from minfer.effects.models.model import forward as model_forward
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import parse_spec
from minfer.effects.models.weights import Weights, empty_weights, named_parts
from minfer.kernels import linear, plain
from minfer.kernels.packages import FLASH, NAMES, QUACK
from minfer.messages import (
    Admitted,
    Cancel,
    Emit,
    Failed,
    Finished,
    Preempted,
    Submit,
    Voided,
)
from minfer.plan import Fill, Plan, TokenLogprobs
from minfer.request import Request, SamplingParams
from tests.circles import long
from tests.core.executing import opened
from tests.kernels.test_flash import stand_in

VOCAB = 101
GREEDY = SamplingParams(temperature=0)
Tokens = dict[tuple[str, int], list[int]]
CUDA = torch.cuda.is_available()
kinds: list[str] = []  # of the executor under test


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    kinds.append(request.param)
    yield request.param
    kinds.pop()


on_gpu = pytest.mark.parametrize("kind", ["cuda"], indirect=True)


def make_executor(
    config: EngineConfig, spec: ModelSpec, weights: Weights
) -> TorchExecutor:
    if kinds[-1] == "cpu":
        return TorchExecutor(config, spec, weights, "cpu")
    graphs, device = config.depth != 2, "cuda" if CUDA else "cpu"
    executor = TorchExecutor(config, spec, weights, device, graphs=graphs, kernels=True)
    if graphs and not CUDA:
        executor.graphs = True
        # What would be captured.
        executor._replay = executor._step  # type: ignore[method-assign]
    return executor


@define
class Model:
    """One tiny model twice: in transformers and in minfer."""

    theirs: Any
    spec: ModelSpec
    weights: Weights

    def logits(self, tokens: list[int]) -> list[float]:
        with torch.inference_mode():
            found = self.theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        row: list[float] = found.tolist()
        return row

    def expected(self, request: Request, index: int = 0) -> list[int]:
        """One sample alone, by transformers' forward and the reference sampler."""
        tokens = list(request.prompt)
        out: list[int] = []
        while len(out) < request.max_tokens:
            at = len(tokens)
            logits = self.logits(tokens)
            token = sample.draw(logits, request.sampling, request.seed, index, at)
            tokens.append(token)
            out.append(token)
            if token in request.stop_ids:
                break
        return out


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,  # tied random embeddings repeat their input
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    theirs: Any = Qwen2ForCausalLM(config)
    theirs.eval()
    values = {
        **config.to_dict(),
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "float32",
    }
    spec = parse_spec(values)
    weights = empty_weights(spec, "float32")
    for name, tensor in named_parts(spec, weights):
        tensor.copy_(theirs.state_dict()[name])
    yield Model(theirs, spec, weights)
    torch.set_num_threads(threads)


def requests(seed: int, count: int = 10) -> list[Request]:
    """Mixed lengths; half are greedy, some share a prefix, some stop at a token."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(21))
    made = []
    for i in range(count):
        own = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 30)))
        how = SamplingParams(
            temperature=0.8,
            top_p=rng.choice([1.0, 0.9]),
            top_k=i % 3 * 10,
            min_p=i % 4 * 0.1,
        )
        made.append(
            Request(
                id=f"r{i}",
                prompt=shared + own if i % 3 == 0 else own,
                max_tokens=rng.randrange(1, 26),
                stop_ids=frozenset({9, 41, 63}) if i % 4 == 0 else frozenset(),
                sampling=GREEDY if i % 2 else how,
                seed=rng.getrandbits(63),
            )
        )
    return made


@pytest.fixture(scope="module")
def reference(model: Model) -> Tokens:
    return {(r.id, 0): model.expected(r) for r in requests(0)}


def on_device(weights: Weights) -> Weights:
    """Where the executor under test wants them."""
    if kinds[-1] == "cpu" or not CUDA:
        return weights

    made: Weights = carried_over(weights)
    return made


def carried_over(tree: Any) -> Any:
    """The same tree with its tensors on the GPU."""
    if isinstance(tree, Tensor):
        return tree.cuda()
    if isinstance(tree, tuple):
        return tuple(map(carried_over, tree))
    if has(type(tree)):
        parts = asdict(tree, recurse=False)
        return type(tree)(**{name: carried_over(part) for name, part in parts.items()})
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
        sizes: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 8,
            "max_model_len": 96,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "vocab_size": VOCAB,
        }
        config = EngineConfig(**{**sizes, **settings})
        executor = make_executor(config, model.spec, on_device(model.weights))
        return cls(config, Driver(config, executor))

    def turn(self) -> None:
        transition = self.driver.turn()
        self.reasons += transition.reasons
        for command in transition.commands:
            if isinstance(command, Emit):
                beside = command.logprobs or ((),) * len(command.ids)
                each = zip(command.ids, command.tokens, beside, strict=True)
                for name, tokens, scores in each:
                    self.tokens.setdefault(name, []).extend(tokens)
                    if scores:
                        assert len(scores) == len(tokens)
                        self.scores.setdefault(name, []).extend(scores)
                self.ends.update({(f.id, f.sample): f for f in command.finished})

    def serve(self, wanted: list[Request], *, apart: int = 0) -> Tokens:
        """Serve to the end, submitting a request every `apart` turns."""
        for request in wanted:
            self.driver.post(Submit(request))
            for _ in range(apart):
                self.turn()
        while self.driver.busy:
            self.turn()
        return self.tokens

    def count(self, kind: type) -> int:
        return sum(isinstance(reason, kind) for reason in self.reasons)


@pytest.mark.parametrize(
    ("depth", "max_repeat"), [(1, 1), (2, 4), *long([(1, 4), (2, 1), (3, 1), (3, 4)])]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 17},
        {"block_size": 1, "num_blocks": 400},
        {"block_size": 5},
        {"block_size": 64, "num_blocks": 12},
        {"num_blocks": 9},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(
    model: Model, reference: Tokens, settings: dict[str, int], max_repeat: int, depth: int
) -> None:
    run = Run.start(model, **settings, max_repeat=max_repeat, depth=depth)
    assert run.serve(requests(0), apart=depth % 2) == reference
    assert not run.count(Voided)
    assert {end.reason for end in run.ends.values()} == {"stop", "length"}
    if settings == {"num_blocks": 9}:
        assert run.count(Preempted)


def test_greedy_tokens_are_those_of_generate(model: Model) -> None:
    wanted = [evolve(r, sampling=GREEDY, stop_ids=frozenset()) for r in requests(1, 6)]
    tokens = Run.start(model).serve(wanted)
    for request in wanted:
        prompt = torch.tensor([request.prompt])
        theirs = model.theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens[request.id, 0] == theirs[0, prompt.shape[1] :].tolist()


def test_prefix_hits_give_the_same_tokens(model: Model, reference: Tokens) -> None:
    run = Run.start(model)
    run.serve(requests(0))
    again = [evolve(r, id="again-" + r.id) for r in requests(0)]
    tokens = run.serve(again)
    for request in requests(0):
        assert tokens["again-" + request.id, 0] == reference[request.id, 0]
    hits = [
        r.hit for r in run.reasons if isinstance(r, Admitted) and r.id.startswith("again")
    ]
    assert sum(hits) > 100


@pytest.mark.parametrize("length", [1, 8, 13, 16])
def test_samples_of_one_request_differ_and_are_each_right(
    model: Model, length: int
) -> None:
    how = SamplingParams(temperature=1.0, n=4)
    prompt = tuple(range(10, 10 + length))
    request = Request(id="n", prompt=prompt, max_tokens=12, n=4, sampling=how, seed=11)
    tokens = Run.start(model).serve([request])
    assert tokens == {("n", i): model.expected(request, i) for i in range(4)}
    assert len({tuple(t) for t in tokens.values()}) == 4


def test_a_cancelled_neighbour_changes_nothing(model: Model, reference: Tokens) -> None:
    run = Run.start(model, max_repeat=4)
    for request in requests(0):
        run.driver.post(Submit(request))
    run.turn()
    run.turn()
    run.driver.post(Cancel("r3"))
    tokens = run.serve([])
    assert run.ends["r3", 0].reason == "cancelled"
    del tokens["r3", 0]
    assert tokens == {name: t for name, t in reference.items() if name != ("r3", 0)}


# --- who is filtered --------------------------------------------------------------------


def filters(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of the sampler, whether it filters; it must wherever a row asks for
    that.
    """
    draw, seen = cuda_attention.sample, list[bool]()

    def spy(
        logits: Tensor, who: Tensor, *of: Tensor, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        heat, top_k, top_p, deepest = (x[who.long()] for x in of[:4])
        narrow = (top_k > 0) & (top_k < VOCAB) | (top_p < 1) | deepest.isfinite()
        assert filtered or not (narrow & (heat >= sample.GREEDY_BELOW)).any()
        seen.append(filtered)
        return draw(logits, who, *of, filtered=filtered)

    monkeypatch.setattr(cuda_attention, "sample", spy)
    return seen


@on_gpu
def test_whoever_is_filtered_is(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = filters(monkeypatch), Run.start(model, depth=2)
    assert run.serve(requests(0), apart=1) == reference
    for how in ({"min_p": 0.2}, {"top_k": 3}, {"top_p": 0.5}):
        seen.clear()
        one = Request(
            id=str(how), prompt=(3, 4), max_tokens=9, sampling=SamplingParams(**how)
        )
        assert run.serve([one])[one.id, 0] == model.expected(one)
        assert seen
        assert all(seen)


@on_gpu
def test_nobody_is_filtered_where_nothing_is_left_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = filters(monkeypatch), Run.start(model, depth=2)
    ways = [evolve(GREEDY, top_k=5, top_p=0.5, min_p=0.1), SamplingParams(top_k=VOCAB)]
    one = Request(id="", prompt=(3, 4), max_tokens=9)
    run.serve([evolve(one, id=str(i), sampling=how) for i, how in enumerate(ways)])
    assert seen
    assert not any(seen)


# --- log-probabilities ------------------------------------------------------------------

ASKED = (None, 0, 3, None, 20)  # in turn


def asking(wanted: list[Request]) -> list[Request]:
    """Requests of which some ask for log-probabilities."""
    each = zip(wanted, ASKED * len(wanted), strict=False)
    return [evolve(r, sampling=evolve(r.sampling, logprobs=k)) for r, k in each]


def check_scores(model: Model, run: Run, wanted: list[Request]) -> None:
    """Those who asked, and nobody else, got those of transformers: within 1e-4, in
    float32.
    """
    asked = {
        (r.id, i): r
        for r in wanted
        for i in range(r.n)
        if r.sampling.logprobs is not None
    }
    assert run.scores.keys() == asked.keys()
    for name, request in asked.items():
        tokens, k = run.tokens[name], request.sampling.logprobs
        assert len(run.scores[name]) == len(tokens)
        for at, (token, told) in enumerate(zip(tokens, run.scores[name], strict=True)):
            logits = model.logits([*request.prompt, *tokens[:at]])
            exact = torch.tensor(logits).double().log_softmax(0)
            likeliest = exact.argsort(descending=True).tolist()
            assert told.rank == likeliest.index(token) + 1
            assert told.likeliest == (*likeliest[:k],)
            close = torch.tensor([told.logprob, *told.logprobs]).double()
            right = exact[[token, *told.likeliest]]
            torch.testing.assert_close(close, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("depth", "max_repeat"), [(2, 4), *long([(1, 1), (3, 1), (3, 4)])]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 3}, {"num_blocks": 9}],
    ids=str,
)
def test_some_ask_for_log_probabilities(
    model: Model, reference: Tokens, settings: dict[str, int], max_repeat: int, depth: int
) -> None:
    run, wanted = (
        Run.start(model, **settings, max_repeat=max_repeat, depth=depth),
        requests(0),
    )
    assert run.serve(asking(wanted), apart=depth % 2) == reference
    check_scores(model, run, asking(wanted))
    if settings == {"num_blocks": 9}:
        assert run.count(Preempted)


def test_log_probabilities_of_several_samples(model: Model) -> None:
    how = SamplingParams(temperature=1.5, top_k=5, n=4, logprobs=2)
    request = Request(
        id="n", prompt=tuple(range(9)), max_tokens=12, n=4, sampling=how, seed=11
    )
    run = Run.start(model, max_repeat=2)
    run.serve([request])
    check_scores(model, run, [request])
    assert max(one.rank for scores in run.scores.values() for one in scores) > 1


def test_log_probabilities_where_steps_fail(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 9 == 0:
            raise MemoryError
        return model_forward(*arguments)

    monkeypatch.setattr(torch_executor, "forward", failing)
    run, wanted = Run.start(model, num_blocks=20, max_repeat=4), asking(requests(0))
    assert run.serve(wanted, apart=1) == reference
    check_scores(model, run, wanted)
    assert run.count(Voided)


def test_log_probabilities_are_greedy_first_and_cost_only_those_steps(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(model, num_blocks=200)
    executor: Any = run.driver.executor
    steps, step = list[bool](), executor._run

    def seen(flight: Any, kind: Any, *more: Any) -> None:
        steps.append(kind.scored)
        step(flight, kind, *more)

    monkeypatch.setattr(executor, "_run", seen)
    long = [
        Request(id=str(i), prompt=(i + 2,), max_tokens=40, sampling=GREEDY)
        for i in range(5)
    ]
    alone = run.serve(long)
    assert not any(steps)
    assert not run.scores
    steps.clear()
    short = evolve(long[0], id="asks", max_tokens=7, sampling=evolve(GREEDY, logprobs=1))
    again = run.serve([*(evolve(r, id="again-" + r.id) for r in long), short])
    assert all(again["again-" + r.id, 0] == alone[r.id, 0] for r in long)
    assert steps == [True] * steps.count(True) + [False] * steps.count(False)
    assert 7 <= steps.count(True) < 12
    told = run.scores["asks", 0]
    assert {one.rank for one in told} == {1}
    assert [one.likeliest for one in told] == [(token,) for token in again["asks", 0]]
    assert all((one.logprob,) == one.logprobs for one in told)


# --- failures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("not enough memory"), MemoryError()], ids=repr
)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_repeat", [1, 4])
def test_a_failing_forward_fails_its_step_only(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    late: bool,
    max_repeat: int,
) -> None:
    calls = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = model_forward(*arguments) if late or calls % 9 else None
        if calls % 9 == 0:
            raise error
        assert out is not None
        return out

    monkeypatch.setattr(torch_executor, "forward", failing)
    run = Run.start(model, max_repeat=max_repeat, num_blocks=20)
    assert run.serve(requests(0), apart=1) == reference
    voided = [reason for reason in run.reasons if isinstance(reason, Voided)]
    assert voided
    assert {v.error for v in voided} == {repr(error)}


def test_what_earlier_owners_left_in_blocks_does_not_matter(
    model: Model, reference: Tokens
) -> None:
    for depth in (1, 2):
        run = Run.start(model, depth=depth, num_blocks=20)
        run.driver.executor.cache.data.fill_(torch.nan)  # type: ignore[attr-defined]
        samples = Request(
            id="n",
            prompt=(9,) * 13,
            max_tokens=12,
            n=3,
            sampling=SamplingParams(n=3),
            seed=11,
        )
        tokens = run.serve([*requests(0), samples], apart=1)
        assert not run.count(Voided)
        assert tokens == reference | {
            ("n", i): model.expected(samples, i) for i in range(3)
        }


def prefill(step: int, name: str, token: int) -> Plan:
    """A plan that gives row 0 to a request with a prompt of one token."""
    request = Request(id=name, prompt=(token,), max_tokens=3, sampling=GREEDY)
    fills, opens = (Fill(0, request.prompt),), (opened(request, (step,)),)
    return Plan(step, (0,), (0,), (0,), (1,), (1,), fills, opens)


def test_logits_that_are_not_finite_name_who_drew_though_another_has_the_row(
    model: Model,
) -> None:
    embed = model.weights.embed.clone()
    embed[VOCAB - 1] = torch.nan
    broken = Model(model.theirs, model.spec, evolve(model.weights, embed=embed))
    executor: Any = Run.start(broken).driver.executor
    flights = [Flight(prefill(0, "bad", VOCAB - 1)), Flight(prefill(1, "next", 5))]
    for flight in flights:
        executor._attempt(flight)
    with pytest.raises(LogitsError, match="for request 'bad' "):
        executor._yields(flights[0], {})
    request = Request(id="next", prompt=(5,), max_tokens=3, sampling=GREEDY)
    assert executor._yields(flights[1], {}) == ((model.expected(request)[0],),)


@pytest.mark.parametrize("at", [0, 30])
def test_a_request_whose_logits_are_not_finite_ends_alone(
    model: Model, reference: Tokens, at: int
) -> None:
    wanted = [
        r for r in requests(0) if VOCAB - 1 not in r.prompt + tuple(reference[r.id, 0])
    ]
    assert len(wanted) > 5
    embed = model.weights.embed.clone()
    embed[VOCAB - 1] = torch.nan
    broken = Model(model.theirs, model.spec, evolve(model.weights, embed=embed))
    prompt = [2] * 40
    prompt[at] = VOCAB - 1
    bad = Request(id="bad", prompt=tuple(prompt), max_tokens=9, sampling=GREEDY)
    run = Run.start(broken, max_num_batched_tokens=16, num_blocks=12)
    tokens = run.serve([*wanted[:3], bad, *wanted[3:]], apart=1)
    assert {name: t for name, t in tokens.items() if t} == {
        (r.id, 0): reference[r.id, 0] for r in wanted
    }
    end = run.ends["bad", 0]
    assert end.reason == "error"
    assert "logits are not finite for request 'bad' (sample 0)" in end.error
    assert run.count(Voided) == run.config.max_failures


def test_a_failed_plan_takes_those_behind_it_along(model: Model, kind: str) -> None:
    if kind != "cpu" and CUDA:
        pytest.skip("a GPU does not recover from a token outside the vocabulary")
    executor = Run.start(model).driver.executor
    data = executor.cache.data.zero_()  # type: ignore[attr-defined]
    request = Request(id="x", prompt=(VOCAB + 1,), max_tokens=3)
    fill, opens = Fill(0, request.prompt), opened(request, (0,))
    executor.launch(Plan(0, (0,), (0,), (0,), (1,), (1,), (fill,), (opens,)))
    executor.launch(Plan(1, (0,), (0,), (1,), (1,), (1,)))
    result = executor.collect()
    assert isinstance(result, Failed)
    assert result.step == 0
    with pytest.raises(IndexError):
        executor.collect()
    assert not data.any()


def test_close_lets_go_of_the_device(model: Model) -> None:
    """A small tensor behind the cache, in its segment, would keep all of it from other
    engines.
    """
    run = Run.start(model)
    run.serve(requests(0))
    run.driver.close()
    large = Tensor | DeviceRows | KVCache | CudaCache
    assert not [
        name
        for name, held in vars(run.driver.executor).items()
        if isinstance(held, large)
    ]


# --- what may not work here -------------------------------------------------------------


def capturing(
    run: Run, monkeypatch: pytest.MonkeyPatch, *errors: Exception
) -> list[Kind]:
    """Have the executor capture steps, as far as it can without a GPU; the first ones
    raise.
    """
    executor: Any = run.driver.executor
    executor.__dict__.pop("_replay", None)
    captured, left = list[Kind](), list(errors)

    def capture(self: Any, kind: Kind, step: Callable[[Kind], None]) -> SimpleNamespace:
        if left:
            raise left.pop(0)
        captured.append(kind)
        made = self.made[kind] = SimpleNamespace(replay=lambda: step(kind))
        return made

    monkeypatch.setattr(GraphCache, "capture", capture)
    return captured


@on_gpu
@pytest.mark.parametrize("works", [True, False])
def test_what_is_compiled_ahead_changes_nothing(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    works: bool,
) -> None:
    run = Run.start(model)
    executor: Any = run.driver.executor
    steps, step = list[Kind](), executor._step

    def noted(kind: Kind, dry: bool = False) -> None:
        assert dry
        steps.append(kind)
        step(kind, dry)

    def refused() -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("no C compiler")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "_step", noted)
        patched.setattr(
            executor.gpu, "compiled", contextlib.nullcontext if works else refused
        )
        executor._prepare()
    prompts = sum(kind.tokens > 0 for kind in steps)
    assert bool(prompts) == works
    assert len(steps) == prompts + works
    said = (
        "kernels are compiled one by one, as they are needed: RuntimeError('no C "
        "compiler')"
    )
    assert caplog.messages == ([] if works else [said])
    assert run.serve(requests(0)) == reference


@on_gpu
def test_graphs_that_cannot_be_captured_are_done_without(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run.start(model, depth=1)
    assert not capturing(run, monkeypatch, RuntimeError("no"), RuntimeError("again"))
    assert run.serve(requests(0)) == reference
    assert run.count(Voided) == 1
    assert not run.driver.executor.graphs  # type: ignore[attr-defined]
    assert caplog.messages == [
        f"{GRAPHS} cannot be used here, and is not from now on: no"
    ]


@on_gpu
def test_graphs_for_which_memory_was_short_are_tried_again(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run.start(model, depth=1)
    captured = capturing(run, monkeypatch, torch.OutOfMemoryError("short"))
    assert run.serve(requests(0)) == reference
    assert run.count(Voided) == 1
    assert captured
    assert len(set(captured)) == len(captured)
    assert not caplog.messages


@on_gpu
def test_a_step_that_failed_is_not_captured_next_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [MemoryError()]

    def failing(*arguments: Any) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return model_forward(*arguments)

    monkeypatch.setattr(torch_executor, "forward", failing)
    run = Run.start(model, depth=1)
    captured = capturing(run, monkeypatch)
    one = Request(id="a", prompt=(3, 4, 5), max_tokens=3, sampling=GREEDY)
    tokens = run.serve([one])
    assert run.count(Voided) == 1
    assert [kind.tokens for kind in captured] == [0]
    run.serve([evolve(one, id="b", prompt=(6, 7, 8))])
    assert [kind.tokens for kind in captured] == [0, 64]
    assert tokens["a", 0] == model.expected(one)


@on_gpu
@pytest.mark.parametrize(("missing", "failed"), [("", 1), ("not importable", 0)])
@pytest.mark.parametrize("package", [FLASH, QUACK])
def test_a_package_that_fails_is_done_without(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    package: str,
    missing: str,
    failed: int,
) -> None:
    """It is to serve chunks, or steps, of 8 tokens and more."""

    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel")

    run = Run.start(model)
    executor: Any = run.driver.executor
    executor.flash_from, executor.fused = {FLASH: (8, False), QUACK: (0, True)}[package]
    executor.captured = 0
    monkeypatch.setattr(cuda_attention, "pays", lambda tokens, _: tokens >= 8)
    monkeypatch.setattr(torch_executor, "load", lambda _: missing)
    monkeypatch.setattr(cuda_attention, "flash_attention", failing)
    for module in (linear, plain):
        monkeypatch.setattr(module, "norm_gated", refusing(module.norm_gated, failing))
    assert run.serve(requests(0)) == reference
    assert run.count(Voided) == failed
    assert (executor.flash_from, executor.fused) == (0, False)
    told = (
        f"{NAMES[package]} cannot be used here, and is not from now on: "
        f"{missing or 'no kernel'}"
    )
    assert caplog.messages == [told]


@on_gpu
def test_flash_attn_is_given_what_it_needs(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its stand-in: one chunk and several, from the beginning and from later on."""
    seen = set[tuple[bool, bool]]()

    def attend(*given: Any, **how: Any) -> None:
        counts = how["cu_seqlens_q"].diff()
        seen.add((len(counts) > 1, bool((how["seqused_k"] > counts).any())))
        stand_in(*given, **how)

    run = Run.start(model)
    executor: Any = run.driver.executor
    executor.flash_from, executor.captured = 2, 0
    monkeypatch.setattr(torch_executor, "load", lambda _: "")
    monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=attend))
    assert run.serve(requests(0)) == reference
    one = Request(
        id="x", prompt=tuple(range(3, 83)), max_tokens=3, sampling=GREEDY
    )  # in two steps
    assert run.serve([one])["x", 0] == model.expected(one)
    assert {(False, False), (False, True), (True, False)} <= seen


def refusing(
    serve: Callable[..., Tensor], failing: Callable[[], None]
) -> Callable[..., Tensor]:
    """A product that fails when quack is to serve it."""

    def served(*given: Any, fused: bool) -> Tensor:
        if fused:
            failing()
        return serve(*given, fused=fused)

    return served


# --- the steady path --------------------------------------------------------------------


def test_a_steady_decode_names_its_rows_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    set_batch = DeviceRows.set_batch

    def counted(self: DeviceRows, rows: tuple[int, ...], size: int) -> None:
        calls.append(rows)
        set_batch(self, rows, size)

    monkeypatch.setattr(DeviceRows, "set_batch", counted)
    run = Run.start(model, num_blocks=200)
    run.serve([Request(id=str(i), prompt=(i + 2,), max_tokens=60) for i in range(8)])
    assert len(calls) == 1


def test_steady_decoding_leaves_no_garbage_for_the_collector(model: Model) -> None:
    run = Run.start(model)
    run.driver.post(Submit(Request(id="a", prompt=(3, 4), max_tokens=60)))
    for _ in range(10):
        run.turn()
    gc.collect()
    for _ in range(30):
        run.turn()
    assert gc.collect() == 0


def test_a_small_model_works_in_one_thread_and_leaves_other_threads_theirs(
    model: Model,
) -> None:
    seen = list[int]()

    def serve() -> None:
        run = Run.start(model)
        run.serve([Request(id="a", prompt=(3, 4), max_tokens=3)])
        seen.append(1 if run.driver.executor.stream else torch.get_num_threads())  # type: ignore[attr-defined]

    torch.set_num_threads(2)
    try:
        for work in (serve, lambda: seen.append(torch.get_num_threads())):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 2]
