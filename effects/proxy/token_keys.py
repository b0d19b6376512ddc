"""Keys of blocks of a request's token ids, for a router with the model's tokenizer.

They are compared with the blocks that servers report (`kv_events`), so ids have to be
those that the servers make: bodies are read, and conversations rendered, as `minfer
serve` does. A body that minfer would refuse is routed without keys, and so is one with
encrypted reasoning: a router has no secret to read that.
"""

from typing import Final

import msgspec
from attrs import evolve

from minfer.blocks.keys import Key, block_keys, root_key
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.proxy.prompt_keys import TOKEN_BYTES, PromptKeys
from minfer.effects.serving.endpoints import ENDPOINTS
from minfer.effects.serving.input_workers.task import ModelFacts, WorkerModel
from minfer.effects.setup.folders import model_folder
from minfer.effects.text.tools.formats import NONE, Parsers

_MAX_CONTEXT_TOKENS: Final = 2**20  # of the longest prompt that is read
_VOCAB_SIZE: Final = 2**32  # token ids are the server's to check


class _Salt(msgspec.Struct):
    cache_salt: str = ""


def tokens_root(salt: str = "") -> Key:
    """The key before the first block of token ids."""
    return root_key(b"tokens", salt.encode("utf-8", "surrogatepass"))


class TokenKeys:
    """A model's tokenizer and chat template. Raises ConfigError and CheckpointError if
    they cannot be read.
    """

    def __init__(
        self,
        model: str,
        block_size: int,
        templates: TemplateSettings = TemplateSettings(),
        parsers: Parsers = Parsers(),
    ) -> None:
        """`templates` and `parsers` are those of the servers."""
        self.folder = str(model_folder(model))
        self.templates = templates
        self.parsers = parsers
        facts = ModelFacts(
            folder=self.folder,
            vocab_size=_VOCAB_SIZE,
            hidden_size=0,
            max_model_len=_MAX_CONTEXT_TOKENS,
            default_params={},
            names=(),
            template_settings=templates,
        )
        model_info = WorkerModel(facts)
        tokenizer = model_info.tokenizer
        parsers = parsers.resolve_for(tokenizer)
        # Tools of an unknown format are for the servers to refuse.
        tools = NONE if parsers.unknown_tools else parsers.tools
        facts = evolve(
            facts,
            tool_parser=tools,
            reasoning_parser=parsers.reasoning,
            response_template=parsers.response,
            call_form=parsers.written,
        )
        self._model = WorkerModel(facts, tokenizer=tokenizer)
        self._endpoints = {endpoint.path: endpoint for endpoint in ENDPOINTS}
        self.block_size = block_size

    def read(self, path: str, body: bytes) -> PromptKeys:
        """The keys of a request's first prompt, and the tokens of all. Never raises; it
        may take a while, and may run in any thread.
        """
        try:
            request = self._endpoints[path].read(body).generation(self._model)
            salt = msgspec.json.decode(body, type=_Salt).cache_salt
        except Exception:  # its server reports what is wrong with it
            return PromptKeys(tokens=len(body) // TOKEN_BYTES)
        prompts = [prompt.ids for prompt in request.prompts]
        keys = block_keys(tokens_root(salt), prompts[0], self.block_size)
        return PromptKeys(keys, sum(map(len, prompts)))
