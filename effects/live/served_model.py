"""A model, with its text side in this process, and its engine here or in others: the base
of `LLM` and `AsyncLLM`.
"""

import contextlib
import functools
import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self

import attrs

from minfer.effects.execution.tiers.folder_epochs import FolderEpochs
from minfer.effects.execution.warming.start_progress import (
    Report,
    ignore_progress,
    logged,
)
from minfer.effects.live.absent_features import absent_method
from minfer.effects.live.adapters.served_adapters import ServedAdapters
from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.client import EngineClient
from minfer.effects.live.constraints.grammar_masks import GrammarMasks
from minfer.effects.live.engine import open_engine as opening
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.engine_worker import EngineWorker
from minfer.effects.live.engine.host_adapters import host_adapters
from minfer.effects.live.engine.open_rank import open_store
from minfer.effects.live.engine_metrics import Metric, read_metrics
from minfer.effects.live.errors import RequestError
from minfer.effects.live.frontend import Frontend
from minfer.effects.live.input_processing import input_processor
from minfer.effects.live.input_processing.input_processor import (
    RequestInput,
    SchedulingHints,
    TokenizedPrompt,
)
from minfer.effects.live.input_processing.logit_checks import BadWords, read_bad_words
from minfer.effects.live.input_processing.prompts import (
    ChatRenderer,
    Prompt,
    read_prompt,
)
from minfer.effects.live.input_processing.template_settings import (
    UNKNOWN_FORMAT_MESSAGE,
    TemplateSettings,
    parsers_of,
    template_settings,
)
from minfer.effects.live.kv_events.engine_events import (
    EngineEvents,
    Publisher,
    check_layers,
    open_publisher,
)
from minfer.effects.net.run_folder import run_folder
from minfer.effects.setup.engine_args import REMOVED, EngineArgs
from minfer.effects.setup.lora_settings import read_modules
from minfer.effects.setup.option_descriptions import settings_docstring
from minfer.effects.setup.prepare import Setup, prepare
from minfer.effects.text.grammars.grammar_library import Compiler, GrammarError
from minfer.effects.text.grammars.store import Grammars
from minfer.effects.text.output_processor import OutputProcessor, Sink
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers
from minfer.effects.text.tools.table import TOOLS
from minfer.records.request import SamplingParams
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from minfer.effects.text.chat_templates import Tools
    from minfer.effects.text.user_tokenizer import UserTokenizer


P = ParamSpec("P")


def _with_parameters_of(
    record: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Returns a decorator of an `__init__` that passes its `**settings` on to `record`:
    type checkers, `help` and `inspect.signature` see the parameters of `record`, and
    `help` their descriptions.
    """

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        parameters = dict(inspect.signature(init).parameters)
        parameters.popitem()  # **settings
        for name, parameter in inspect.signature(record).parameters.items():
            parameters.setdefault(name, parameter)
        signature = inspect.Signature([*parameters.values()])
        init.__signature__ = signature  # type: ignore[attr-defined]
        init.__doc__ = settings_docstring()
        return init

    return decorate


class ServedModel(ChatRenderer):
    """A model with its tokenizer, and an engine that runs it: one of this process, or, in
    an API server's process, those behind a `client` (`from_client`).

    `model` is a Hugging Face checkpoint folder, its name on the hub, or a GGUF file; None
    is the model that comes with minfer. The constructor's docstring explains the other
    settings, and errors.

    Runs are reproducible: a request without a seed of its own gets one that is a function
    of `seed` and of how many requests there were before it.

    `client` is the interface to the engine; `frontend` has the requests in progress.
    """

    setup: Setup
    tokenizer: Tokenizer | None
    template_settings: TemplateSettings
    epochs: FolderEpochs | None  # of the folder of KV blocks, if there is one
    # Returns how often the prefix cache was reset, or its epoch.
    count_resets: Callable[[], int]
    parsers: Parsers  # how the model writes tool calls and reasoning
    # Only of a server: the key that encrypts reasoning which clients keep; and whether
    # hosted tools are refused instead of being left out.
    reasoning_key: bytes = b""
    refuses_hosted_tools: bool = False
    # The internals of an engine in this process, for tests and benchmarks.
    worker: EngineWorker
    kv_events: EngineEvents | None = None  # what that publishes
    adapters: ServedAdapters | None = None  # that requests may name
    client: EngineClient
    frontend: Frontend
    _finalizer: "weakref.finalize[..., Any] | None" = None

    @_with_parameters_of(EngineArgs)
    def __init__(self, model: str | None = None, **settings: Any) -> None:
        settings = _own_settings(type(self).__name__, settings)
        self._open(EngineArgs(model=model, **settings))

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, report: Report = ignore_progress
    ) -> Self:
        """Returns the model of these settings, as the constructor makes it; progress goes
        to `report`.
        """
        model = cls.__new__(cls)
        model._open(engine_args, report)
        return model

    def _open(self, args: EngineArgs, report: Report = ignore_progress) -> None:
        """Load the model, and start an engine."""
        if args.enable_lora and not args.lora_registry:
            # Of the names of adapters, where no server has made it.
            resources = contextlib.ExitStack()
            folder = resources.enter_context(run_folder())
            weakref.finalize(self, _release_in_process, os.getpid(), resources)
            args = attrs.evolve(args, lora_registry=str(folder / "adapters"))
        with contextlib.ExitStack() as stack:
            publisher = open_publisher(
                args.kv_events_config, caches_prefixes=args.enable_prefix_caching
            )
            if publisher is not None:
                stack.callback(publisher.close)  # if it cannot be loaded
            self._start_engine(args, report)
            if publisher is not None:
                self._publish_events(publisher)
            stack.pop_all()

    def _start_engine(self, args: EngineArgs, report: Report) -> None:
        """Load the model, and start its engine."""
        self._load_tokenizer(prepare(args))
        setup = self.setup
        check_layers(setup.args.kv_events_config, setup.config)
        if self.adapters is not None:
            self.adapters.load_modules(read_modules(setup.args.lora_modules))
        store = open_store(setup)
        executor = opening.open_executor(setup, self.tokenizer, logged(report), store)
        self.setup = setup = opening.with_costs(setup, executor)
        journal = opening.open_journal(setup, executor)
        masks = GrammarMasks(self.grammars, setup.config.block_size, setup.stop_ids)
        driver = Driver(
            setup.config,
            executor,
            record=journal,
            masks=masks,
            drafts=opening.host_drafts(setup),
        )
        adapters = None if self.adapters is None else self.adapters.registry
        loaded = host_adapters(executor, adapters, setup.args)
        self.worker = EngineWorker(driver, journal, self.grammars, store, loaded)
        self._attach(self.worker, 0)

    def _publish_events(self, publisher: Publisher) -> None:
        """Publish the engine's KV events."""
        config, fingerprint = self.setup.config, self.setup.fingerprint
        cached_root = functools.lru_cache(1)(input_processor.cache_root)
        count_resets = self.count_resets
        events = EngineEvents(
            config, publisher, lambda: cached_root(fingerprint, count_resets(), b"", "")
        )
        self.kv_events = events
        self.worker.turn_listeners.append(events.observe)
        self._close_when_unused(events)

    @classmethod
    def from_client(cls, client: EngineClient, setup: Setup, first: int = 0) -> Self:
        """Returns the model of the engine behind `client`, which has this `setup`; the
        first request made here is number `first`, from 0.
        """
        model = cls.__new__(cls)
        model._load_tokenizer(setup)
        model._attach(client, first)
        return model

    def _load_tokenizer(self, setup: Setup) -> None:
        """Load the tokenizer and grammars."""
        self.template_settings = template_settings(setup.args)
        self.tokenizer = None
        if not setup.args.skip_tokenizer_init:
            tokenizer = Tokenizer(setup.tokenizer_folder, setup.config.max_model_len)
            if (template := self.template_settings.template) is not None:
                tokenizer = tokenizer.with_template(template)
            self.tokenizer = tokenizer
            ends = setup.stop_ids.union(self.tokenizer.eos_ids)
            setup = attrs.evolve(setup, stop_ids=ends)
        self.setup = setup
        self.adapters = ServedAdapters.of(setup)
        disk = setup.args.kv_disk
        self.epochs = None if disk is None else FolderEpochs.open(Path(disk))
        self.set_parsers(parsers_of(setup.args))
        # Not a method: a model that nobody refers to is closed at once.
        self.grammars = Grammars(partial(_make_compiler, self.tokenizer, setup))

    def _attach(self, client: EngineClient, first: int) -> None:
        self.client = client
        self.frontend = Frontend(client)
        epochs = self.epochs
        self.count_resets = lambda: client.resets if epochs is None else epochs.of_all
        # Imported and loaded objects stay alive: exclude them from garbage collections.
        gc.freeze()
        self._close_when_unused()
        self.numbers = threading.Lock()
        self.count = first  # requests made so far

    def _close_when_unused(self, kv_events: EngineEvents | None = None) -> None:
        """Let the model be closed when it is collected, or the program ends. (A program
        that ends with all objects alive makes Triton's library complain of them.)
        """
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(
            self, _close_in_process, os.getpid(), self.client, self.grammars, kv_events
        )

    def set_parsers(self, parsers: Parsers) -> None:
        """Parse tool calls and reasoning with `parsers`, from now on."""
        self.parsers = parsers.resolve_for(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of a request that has none: of the model's
        generation_config.json.
        """
        return self.setup.default_sampling_params()

    def get_tokenizer(self) -> "UserTokenizer":
        """Returns the model's tokenizer, with the methods of transformers' that vLLM's
        users call. Raises ConfigError if the model runs without one.
        """
        from minfer.effects.text.user_tokenizer import UserTokenizer  # it imports jinja2

        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer; leave skip_tokenizer_init out")
        return UserTokenizer(self.tokenizer)

    def check_constraint(self, params: SamplingParams) -> None:
        """Raise RequestError if a request's constraint cannot be compiled.

        It is compiled, which takes a while, unless it was just before.
        """
        if params.structured_outputs is not None:
            input_processor.check_constraint(self.grammars, params.structured_outputs)

    def warm_grammars(self) -> None:
        """Load the vocabulary for grammars now: all threads of this process wait for it,
        which should not happen during requests.
        """
        with contextlib.suppress(GrammarError):
            self.grammars.load()

    def reset_prefix_cache(self) -> None:
        """Make all blocks in the prefix cache unusable for new requests.

        Running requests are not disturbed. Raises EngineDeadError, and OSError as
        `note_reset`.
        """
        self.client.reset_cache()
        self.note_reset()

    def note_reset(self) -> None:
        """Have blocks on disk not be found any more, in any thread. Raises OSError if
        that cannot be noted in their folder.
        """
        if self.epochs is not None:
            self.epochs.raise_all()

    def get_metrics(self) -> list[Metric]:
        """Returns the engine's metrics at the moment, in vLLM's kinds and names: see
        `minfer.effects.live.engine_metrics`.
        """
        return list(read_metrics(self.client.snapshot()))

    def close(self) -> None:
        """Cancel all requests and release the model. May be called again; it is called
        when the program ends.
        """
        if self._finalizer is not None:
            self._finalizer()

    def shutdown(self, timeout: float | None = None) -> None:
        """Close it, as `close` does; requests that run may take `timeout` seconds to end
        before that. vLLM's name.
        """
        if timeout:
            self.client.drain(timeout)
        self.close()

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to use instead of a method of vLLM's."""
            raise absent_method(type(self).__name__, name)

    def _check_tools(self, tools: "Tools | None") -> None:
        """Raise RequestError if there are tools, and it is unknown how the model calls
        them.
        """
        if tools and self.parsers.unknown_tools:
            remedy = f'set tool_call_parser to one of {", ".join(TOOLS)}, or "none"'
            raise RequestError(
                f"tools: {UNKNOWN_FORMAT_MESSAGE}; {remedy}", param="tools"
            )

    def _make_processor(
        self,
        prompt: Prompt | TokenizedPrompt,
        sink: Sink,
        params: SamplingParams | BeamSearchParams | str,
        *,
        count: int,
        urgency: SchedulingHints,
        streaming: bool = False,
        name: str = "",
        shown: Iterable[str] = (),
        adapter: str = "",
    ) -> OutputProcessor:
        """Returns a checked request after `count` others: by the type of `params` for
        samples, for a search, or for a vector; with the `adapter` of that digest, if any.
        Raises RequestError.
        """
        tokenized = read_prompt(prompt, self.tokenizer, self.setup.spec.vocab_size)
        request_input = RequestInput(
            setup=self.setup,
            prompt=tokenized,
            count=count,
            urgency=urgency,
            name=name,
            resets=self.count_resets(),
            adapter=adapter,
        )
        if isinstance(params, str):
            request = input_processor.make_pooled_request(request_input, params)
            return OutputProcessor(request, sink, tokenized.text, session=urgency.session)
        special = (
            self.tokenizer.find_special_ids(shown) if self.tokenizer else frozenset[int]()
        )
        bad_words: BadWords = ()
        if isinstance(params, BeamSearchParams):
            request = input_processor.make_search(request_input, params)
        else:
            if streaming and params.chooses:
                reason = "best_of: the best samples are known once all have ended; do not"
                raise input_processor.RequestError(
                    f"{reason} stream, or leave it out", 0, "best_of"
                )
            self.check_constraint(params)
            bad_words = read_bad_words(params.bad_words, self.tokenizer)
            request = input_processor.make_request(request_input, params, bad_words)
        return OutputProcessor(
            request,
            sink,
            tokenized.text,
            self.tokenizer,
            streaming,
            special,
            session=urgency.session,
        )


def _make_compiler(tokenizer: Tokenizer | None, setup: Setup) -> Compiler:
    """Returns the compiler of constraints for a model's vocabulary. Raises
    GrammarError.
    """
    from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler

    if tokenizer is None:
        raise GrammarError("needs a tokenizer; this model runs without one")
    return LlguidanceCompiler(tokenizer.as_json(), setup.spec.vocab_size, setup.stop_ids)


def _close_in_process(
    pid: int, client: EngineClient, grammars: Grammars, kv_events: EngineEvents | None
) -> None:
    """Close a model's engine, events and grammars, but not in processes that were forked
    from this one.
    """
    if os.getpid() == pid:
        client.close()
        if kv_events is not None:
            kv_events.close()
        grammars.close()
        gc.unfreeze()


def _release_in_process(pid: int, resources: contextlib.ExitStack) -> None:
    """Release resources, but not in processes that were forked from this one."""
    if os.getpid() == pid:
        resources.close()


def _own_settings(owner: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, those of vLLM's as `read_settings` has them. Raises as it does,
    and TypeError for settings that were removed.
    """
    known = attrs.fields_dict(EngineArgs).keys()
    for name in settings.keys() & REMOVED.keys():
        raise TypeError(f"{owner}: {name} was removed: {REMOVED[name]}")
    from minfer.effects.setup.vllm_settings import read_settings  # it has a large table

    return read_settings(owner, settings, known)
