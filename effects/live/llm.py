"""The library: `from minfer import LLM, SamplingParams`.

    with LLM() as llm:
        for output in llm.generate(["def add(a, b):", "import "],
        SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The engine runs in this process, in a thread that lives while requests are served.
Requests from several threads share it and are batched together.
"""

import contextlib
import gc
import platform
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, Unpack

import attrs

from minfer.effects.execution.executor import Executor
from minfer.effects.live import edge
from minfer.effects.live.driver import Driver
from minfer.effects.live.edge import Asked, Prompt, as_list
from minfer.effects.live.journal_writer import Writer
from minfer.effects.live.worker import Worker
from minfer.effects.setup.memory import NotEnoughMemoryError, size_text
from minfer.effects.setup.options import EngineArgs, Setup, prepare
from minfer.effects.text.assembly import Assembly, Sink
from minfer.effects.text.outputs import RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.request import SamplingParams

if TYPE_CHECKING:
    from minfer.effects.models.model import Model
    from minfer.effects.models.weights import Weights
    from minfer.effects.text.chat import ChatOptions, Conversation, Conversations

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Priorities = Sequence[int] | None
Progress = (
    bool | Callable[..., Any]
)  # whether to show a bar, or what makes one as tqdm does
Inbox = SimpleQueue[Assembly]
Jobs = tuple[list[Assembly], Inbox]  # requests, and where they say that they have news


def open_executor(setup: Setup, tokenizer: Tokenizer | None) -> Executor:
    """The executor that the settings ask for, with its weights where it has any.

    Raises CheckpointError if they cannot be used.
    """
    config, spec, args = setup.config, setup.spec, setup.args
    if args.executor == "oracle":
        from minfer.runs.oracle import Oracle

        return Oracle(config.block_size, spec.vocab_size)
    if args.executor == "dry":
        from minfer.effects.execution.dry import Dry, encoded_passage

        spelled = encoded_passage(tokenizer.encode) if tokenizer is not None else ()
        return Dry(spelled or (tuple(range(spec.vocab_size)),))
    import torch

    needs = setup.memory
    try:
        weights = _weights(setup)
    except (MemoryError, torch.OutOfMemoryError) as error:
        what = (
            f"weights of {size_text(needs.weights)} do not fit beside what else is "
            f"in memory"
        )
        raise NotEnoughMemoryError(
            f"{what}: {_line(error)}; choose a smaller model"
        ) from error
    try:
        from minfer.effects.execution.torch_executor import TorchExecutor

        eager, checked = args.enforce_eager, args.check_steps
        device = setup.device.kind
        return TorchExecutor(
            config, spec, weights, device, graphs=not eager, checked=checked
        )
    except (MemoryError, RuntimeError) as error:
        what = (
            f"{config.num_blocks} KV blocks ({size_text(needs.kv_cache)}) cannot be had"
        )
        raise NotEnoughMemoryError(
            f"{what}: {_line(error)}; ask for a smaller KV cache"
        ) from error


def open_journal(setup: Setup, executor: Executor) -> Writer | None:
    """The journal that the settings ask for. Raises ConfigError if it cannot
    be written.
    """
    args = setup.args
    if args.journal is None:
        return None
    packages = (
        ()
        if args.executor != "torch"
        else ("torch", "triton", "flash-attn-4", "quack-kernels")
    )
    versions = {d.name: d.version for name in packages for d in distributions(name=name)}
    model = setup.folder.name if args.journal_redact else str(setup.folder)
    about = {
        "model": model,
        "dtype": setup.spec.dtype,
        "executor": args.executor,
        "device": setup.device.name,
        "fingerprint": setup.fingerprint.hex(),
        "seed": args.seed,
        "eager": args.enforce_eager,
        "kernels": dict(getattr(executor, "routes", ())),
        "versions": {"python": platform.python_version(), **versions},
    }
    size, redact = args.journal_size, args.journal_redact
    return Writer(Path(args.journal), setup.config, about, size=size, redact=redact)


def _weights(setup: Setup) -> "Weights | Model":
    """What the settings say, on the device that they say."""
    from minfer.effects.models.checkpoint import load_weights, random_weights, read_config

    spec, seed, device = setup.spec, setup.args.seed, setup.device.kind
    dummy = setup.args.load_format == "dummy"
    if spec.parameters:
        from minfer.effects.execution.attention import make_cache
        from minfer.effects.models.fallback import load_fallback

        raw = read_config(setup.folder)
        drawn = seed if dummy else None
        return load_fallback(setup.folder, raw, spec, make_cache, drawn, device)
    if dummy:
        return random_weights(spec, spec.dtype, seed, device)
    return load_weights(setup.folder, spec, spec.dtype, device)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class ServedModel:
    """A model with its tokenizer and an engine that runs it: what `LLM` and `AsyncLLM`
    share.

    `model` is a Hugging Face checkpoint folder; None is the model that comes with minfer.
    The other settings are those of `EngineArgs`, by name. Raises CheckpointError for a
    checkpoint that cannot be used, ConfigError for settings out of range, and
    NotEnoughMemoryError.

    Runs are reproducible: a request without a seed of its own gets one that is a function
    of
    `seed` and of how many requests there were before it.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if settings.get("executor", "") is None:
            del settings["executor"]
        known = {field.name for field in attrs.fields(EngineArgs)}
        if odd := settings.keys() - known:
            what = f"{type(self).__name__} has no setting {min(odd)!r}"
            raise TypeError(f"{what}; it has {', '.join(sorted(known))}")
        setup = prepare(EngineArgs(model=model, **settings))
        self.tokenizer: Tokenizer | None = None
        if not setup.args.skip_tokenizer_init:
            self.tokenizer = Tokenizer(setup.folder)
            setup = attrs.evolve(
                setup, stop_ids=setup.stop_ids.union(self.tokenizer.eos_ids)
            )
        self.setup = setup
        executor = open_executor(setup, self.tokenizer)
        driver = Driver(setup.config, executor, record=open_journal(setup, executor))
        self.worker = Worker(driver)
        # What has been imported and loaded stays: collections need not look at it again
        # and again.
        gc.freeze()
        self.numbers = threading.Lock()
        self.count = 0  # requests made so far

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that names none: of the model's
        generation_config.json.
        """
        return self.setup.default_sampling_params()

    def render(self, messages: "Conversation", **how: Unpack["ChatOptions"]) -> list[int]:
        """Token ids of a conversation, through the model's chat template; see `chat`.

        Raises ChatTemplateError, and RequestError for text that cannot be encoded.
        """
        return list(self._rendered(messages, how).ids)

    def _rendered(self, messages: "Conversation", how: "ChatOptions") -> Asked:
        from minfer.effects.text.chat import render_chat

        text = render_chat(self.tokenizer, messages, how)
        # Templates write begin and end tokens themselves.
        return Asked(text, edge.encoded(text, self.tokenizer, add_special_tokens=False))

    def _job(
        self, prompt: Prompt | Asked, sink: Sink, streaming: bool, *how: Any
    ) -> Assembly:
        """A request, checked; `how` is what `make_request` takes after the prompt.
        RequestError.
        """
        asked = edge.read_prompt(prompt, self.tokenizer, self.setup.spec.vocab_size)
        request = edge.make_request(self.setup, asked, *how)
        return Assembly(request, sink, asked.text, self.tokenizer, streaming)

    def close(self) -> None:
        """Cancel what runs and let go of the model. May be called again."""
        self.worker.close()
        gc.unfreeze()


class LLM(ServedModel):
    """A model that generates text from prompts and answers in conversations.

    Settings and errors are those of `ServedModel`.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        priority: Priorities = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in the order of the prompts.

        A prompt is a string, a list of token ids, or {"prompt": ...} or
        {"prompt_token_ids": ...}, where "cache_salt" keeps its cached prefix apart from
        others'. `sampling_params` are one for all or one for each; None is what the
        model's makers advise, and 16 tokens.

        Raises RequestError, before anything runs, if a request could never be served; its
        `index` says which. A request whose steps fail ends with the finish reason
        "error", and the others go on. An interrupt cancels the requests of this call, and
        the LLM stays usable.
        """
        return self._complete(
            self._jobs(as_list(prompts), sampling_params, priority), use_tqdm
        )

    def chat(
        self,
        messages: "Conversations",
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        **how: Unpack["ChatOptions"],
    ) -> list[RequestOutput]:
        """Answer conversations; the outputs come in the order of the conversations.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat
        template makes its prompt, with the options `tools`, `add_generation_prompt` (true
        unless told otherwise),
        `continue_final_message` and `chat_template_kwargs`. `sampling_params` are as for
        `generate`, but None lets an answer take what room the context has.

        Raises ChatTemplateError, and as `generate` does.
        """
        return self._complete(self._answers(messages, sampling_params, how), use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        priority: Priorities = None,
    ) -> Generator[RequestOutput]:
        """Complete prompts, and yield what is new of any of them as soon as there is
        something.

        Outputs hold new text and new tokens only (vLLM's DELTA), of the samples that have
        any; the last one of a request is `finished`. Requests run once the first output
        is asked for, and leaving the loop early cancels them. Raises as `generate` does,
        at once.
        """
        return self._deltas(self._jobs(as_list(prompts), sampling_params, priority, True))

    def stream_chat(
        self,
        messages: "Conversations",
        sampling_params: Params = None,
        **how: Unpack["ChatOptions"],
    ) -> Generator[RequestOutput]:
        """Answer conversations as `chat` does, and yield what is new as `stream` does."""
        return self._deltas(self._answers(messages, sampling_params, how, True))

    def _complete(self, jobs: Jobs, use_tqdm: Progress) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        ready = self._deltas(jobs)
        with contextlib.closing(ready), _progress(len(jobs[0]), use_tqdm) as advance:
            for output in ready:
                outputs[output.request_id] = output
                advance()
        return [outputs[job.request.id] for job in jobs[0]]

    def _deltas(self, jobs: Jobs) -> Generator[RequestOutput]:
        """Have jobs served, and yield their outputs; whatever ends this early cancels
        them.
        """
        wanted, inbox = jobs
        left = len(wanted)
        try:
            self.worker.submit(wanted)
            while left:
                output = _received(inbox)
                left -= output.finished
                yield output
        except BaseException:
            self.worker.drop(wanted)
            raise

    def _answers(
        self,
        messages: "Conversations",
        params: Params,
        how: "ChatOptions",
        streaming: bool = False,
    ) -> Jobs:
        from minfer.effects.text.chat import conversations

        asked = [self._rendered(one, how) for one in conversations(messages)]
        if params is None:
            params = self.setup.default_sampling_params(max_tokens=None)
        return self._jobs(asked, params, None, streaming)

    def _jobs(
        self,
        wanted: Sequence[Prompt | Asked],
        params: Params,
        priority: Priorities,
        streaming: bool = False,
    ) -> Jobs:
        """Check everything, then make the requests: all of them or none."""
        if params is None:
            params = self.get_default_sampling_params()
        each = edge.params_for(params, len(wanted))
        urgencies = edge.urgencies_for(priority, len(wanted))
        inbox: Inbox = SimpleQueue()
        jobs = []
        with self.numbers:
            for i, one in enumerate(wanted):
                how = each[i], self.count + i, urgencies[i]
                try:
                    jobs.append(self._job(one, inbox.put, streaming, *how))
                except edge.RequestError as error:
                    where = f"prompts[{i}]: " if len(wanted) > 1 else ""
                    raise edge.RequestError(f"{where}{error}", i) from None
            self.count += len(jobs)
        return jobs, inbox

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _received(inbox: Inbox) -> RequestOutput:
    return inbox.get().take()


@contextlib.contextmanager
def _progress(count: int, wanted: Progress) -> Iterator[Callable[[], object]]:
    """Yield a function that moves a progress bar; it shows on a terminal, while work goes
    on.
    """
    if not wanted or not count or (wanted is True and not sys.stderr.isatty()):
        yield lambda: None
        return
    if wanted is True:
        from tqdm import tqdm

        wanted = partial(tqdm, unit="prompt", leave=False)
    bar = wanted(total=count, desc="Processed prompts")
    try:
        yield bar.update
    finally:
        bar.close()
