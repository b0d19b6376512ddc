"""The library: `from minfer import LLM, SamplingParams`.

    with LLM() as llm:
        for output in llm.generate(["def add(a, b):", "import "], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine runs in this process, in a thread that lives while requests are served. Requests from
several threads share it and are batched together.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import attrs

from minfer.effects.assembly import Assembly
from minfer.effects.driver import Driver
from minfer.effects.edge import (
    Prompt,
    RequestError,
    as_list,
    make_request,
    params_for,
    read_prompt,
    urgencies_for,
)
from minfer.effects.executor import Executor
from minfer.effects.options import EngineArgs, Setup, prepare
from minfer.effects.outputs import RequestOutput
from minfer.effects.text import Tokenizer, load_tokenizer
from minfer.effects.worker import Worker
from minfer.request import SamplingParams

LONG = 2.0  # seconds of work after which a progress bar appears

Inbox = SimpleQueue[RequestOutput | Exception]


def open_executor(setup: Setup, tokenizer: Tokenizer | None) -> Executor:
    """The executor that the settings ask for, with its weights where it has any.

    Raises CheckpointError if they cannot be used.
    """
    config, spec, args = setup.config, setup.spec, setup.args
    if args.executor == "oracle":
        from minfer.effects.oracle import Oracle

        return Oracle(config.block_size, spec.vocab_size)
    if args.executor == "dry":
        from minfer.effects.dry import Dry, encoded_passage

        spelled = encoded_passage(tokenizer.encode) if tokenizer is not None else ()
        return Dry(spelled or (tuple(range(spec.vocab_size)),))
    from minfer.effects.checkpoint import load_weights, random_weights
    from minfer.effects.torch_executor import TorchExecutor

    if args.load_format == "dummy":
        weights = random_weights(spec, spec.dtype, args.seed)
    else:
        weights = load_weights(setup.folder, spec, spec.dtype)
    return TorchExecutor.for_config(config, spec, weights)


class LLM:
    """A model that generates text from prompts.

    `model` is a Hugging Face checkpoint folder; None is the model that comes with minfer. The
    other settings are those of `EngineArgs`, by name. Raises CheckpointError for a checkpoint
    that cannot be used, ConfigError for settings out of range, and NotEnoughMemoryError.

    Runs are reproducible: a request without a seed of its own gets one that is a function of
    `seed` and of how many requests this LLM was given before it.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if settings.get("executor") is None:
            settings.pop("executor", None)
        known = {field.name for field in attrs.fields(EngineArgs)}
        for name in settings:
            if name not in known:
                raise TypeError(f"LLM has no setting {name!r}; it has {', '.join(sorted(known))}")
        setup = prepare(EngineArgs(model=model, **settings))
        self.tokenizer: Tokenizer | None = None
        if not setup.args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(setup.folder)
            setup = attrs.evolve(setup, stop_ids=setup.stop_ids.union(self.tokenizer.eos_ids))
        self.setup = setup
        driver = Driver(setup.config, open_executor(setup, self.tokenizer))
        self.worker = Worker(driver)
        self.numbers = threading.Lock()
        self.count = 0  # requests made so far

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in the order of the prompts.

        A prompt is a string, a list of token ids, or {"prompt": ...} or {"prompt_token_ids": ...},
        where "cache_salt" keeps its cached prefix apart from others'. `sampling_params` are one
        for all or one for each; None is `SamplingParams()`, which is 16 tokens at temperature 1.

        Raises RequestError, before anything runs, if a request could never be served; its `index`
        says which. A request whose steps fail ends with the finish reason "error", and the others
        go on. An interrupt cancels the requests of this call, and the LLM stays usable.
        """
        inbox: Inbox = SimpleQueue()
        jobs = self._jobs(prompts, sampling_params, priority, inbox)
        outputs: dict[str, RequestOutput] = {}
        with self._serving(jobs), _progress(len(jobs), use_tqdm) as advance:
            while len(outputs) < len(jobs):
                output = _received(inbox)
                outputs[output.request_id] = output
                advance()
        return [outputs[job.request.id] for job in jobs]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts, and yield what is new of any of them as soon as there is something.

        Outputs hold new text and new tokens only (vLLM's DELTA), of the samples that have any; the
        last one of a request is `finished`. Requests run once the first output is asked for, and
        leaving the loop early cancels them. Raises as `generate` does, at once.
        """
        inbox: Inbox = SimpleQueue()
        jobs = self._jobs(prompts, sampling_params, priority, inbox, streaming=True)
        return self._deltas(jobs, inbox)

    def _deltas(self, jobs: list[Assembly], inbox: Inbox) -> Iterator[RequestOutput]:
        left = len(jobs)
        with self._serving(jobs):
            while left:
                output = _received(inbox)
                left -= output.finished
                yield output

    @contextlib.contextmanager
    def _serving(self, jobs: list[Assembly]) -> Iterator[None]:
        """Have jobs served for the length of a block; whatever ends it early cancels them."""
        try:
            self.worker.submit(jobs)
            yield
        except BaseException:
            self.worker.drop([job.request.id for job in jobs])
            raise

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        inbox: Inbox,
        *,
        streaming: bool = False,
    ) -> list[Assembly]:
        """Check everything, then make the requests: all of them or none."""
        wanted = as_list(prompts)
        params = params_for(sampling_params, len(wanted))
        urgencies = urgencies_for(priority, len(wanted))
        jobs = []
        with self.numbers:
            for i, prompt in enumerate(wanted):
                try:
                    asked = read_prompt(prompt, self.tokenizer, self.setup.spec.vocab_size)
                    number = self.count + i
                    request = make_request(self.setup, asked, params[i], number, urgencies[i])
                except RequestError as error:
                    where = f"prompts[{i}]: " if len(wanted) > 1 else ""
                    raise RequestError(f"{where}{error}", i) from None
                job = Assembly(
                    request,
                    inbox.put,
                    prompt=asked.text,
                    tokenizer=self.tokenizer,
                    streaming=streaming,
                )
                jobs.append(job)
            self.count += len(jobs)
        return jobs

    def close(self) -> None:
        """Cancel what runs and let go of the model. May be called again."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _received(inbox: Inbox) -> RequestOutput:
    got = inbox.get()
    if isinstance(got, Exception):
        raise got
    return got


@contextlib.contextmanager
def _progress(count: int, wanted: bool | Callable[..., Any]) -> Iterator[Callable[[], object]]:
    """Yield a function that moves a progress bar; it shows on a terminal, if work is long."""
    if not wanted or not count or (wanted is True and not sys.stderr.isatty()):
        yield lambda: None
        return
    if wanted is True:
        from tqdm import tqdm

        bar = tqdm(total=count, desc="Processed prompts", unit="prompt", delay=LONG, leave=False)
    else:
        bar = wanted(total=count, desc="Processed prompts")
    try:
        yield bar.update
    finally:
        bar.close()
