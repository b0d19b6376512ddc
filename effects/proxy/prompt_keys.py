"""Keys of blocks of a request's text, for a router without a tokenizer.

Theory. The parts of a prompt come in the order in which chat templates write them:
instructions, tools, messages. Each is written as JSON with sorted keys, without spaces,
so the text of a conversation's next turn begins with the text of this one, whatever
client sends it. That text is cut into blocks of `BLOCK_BYTES`, and their keys are chained
as those of token ids are (`minfer.blocks.keys`). No engine knows these keys: they only
show which requests begin alike. A prompt of token ids is cut as it is.

Marks that clients move from message to message (Anthropic's `cache_control`) are left
out, and with them what else changes from turn to turn and is not at the front of a
prompt: Claude Code's block about billing, and deferred tools. A content that is a list of
one text is read as that text. Model and `cache_salt` are part of all keys: prefixes are
not shared between these.
"""

from array import array
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

import msgspec
from attrs import frozen

from minfer.blocks.keys import Key, Keys, block_keys, root_key
from minfer.effects.cluster.engine_client.api_server_router import MAX_EXPECTED_OUTPUT
from minfer.effects.serving.anthropic.conversation import BILLING_PREFIX

BLOCK_TOKENS: Final = 64
TOKEN_BYTES: Final = 4  # of English text and code, about
BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
MAX_KEYED_BYTES: Final = 2**20  # of a text; what comes later has no keys
_MAX_NAME_CHARS: Final = 128  # of a name
_CACHE_MARK: Final = "cache_control"


class RequestFields(msgspec.Struct):
    """The fields of any endpoint that matter here, of any type."""

    model: Any = None
    cache_salt: Any = None
    # The prompt:
    system: Any = None
    instructions: Any = None
    tools: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    # Its length, and its user:
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None

    @property
    def user_id(self) -> str:
        """The user that the request names, or nothing."""
        named = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return _name(self.safety_identifier) or _name(self.user) or _name(named)

    @property
    def session(self) -> str:
        """What the requests of a session have in common, or nothing."""
        return _name(self.prompt_cache_key) or self.user_id

    @property
    def previous(self) -> str:
        """The response that this one continues, or nothing."""
        return _name(self.previous_response_id)

    @property
    def output(self) -> int | None:
        """Output tokens, if few are allowed; None: not known."""
        for limit in (
            self.max_completion_tokens,
            self.max_tokens,
            self.max_output_tokens,
        ):
            if type(limit) is int:
                return max(0, limit) if limit < MAX_EXPECTED_OUTPUT else None
        return None


@frozen
class PromptKeys:
    """A prompt, as the router sees it."""

    keys: Keys = ()
    tokens: int = 0  # an estimate, where it is text


_fields: Final = msgspec.json.Decoder(RequestFields)
_canonical: Final = msgspec.json.Encoder(order="sorted")


def read_fields(body: bytes) -> RequestFields:
    """The fields of a body; none, if it is no JSON object: its backend refuses it."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return RequestFields()


def text_keys(fields: RequestFields, body: bytes) -> PromptKeys:
    """The keys of a request's text or token ids; none if it has no prompt."""
    try:
        return _read_keys(fields, len(body), marked=_CACHE_MARK.encode() in body)
    except (OverflowError, RecursionError, ValueError):  # its backend refuses it
        return PromptKeys(tokens=len(body) // TOKEN_BYTES)


def _read_keys(fields: RequestFields, size: int, *, marked: bool) -> PromptKeys:
    salt = f"{_name(fields.model)}\0{_name(fields.cache_salt)}"
    root = root_key(b"text", salt.encode("utf-8", "surrogatepass"))
    prompts = _prompts(fields.prompt if fields.prompt is not None else fields.input)
    if _is_ids(prompts[0]):
        lengths = [len(prompt) for prompt in prompts if isinstance(prompt, list)]
        return PromptKeys(_id_keys(root, prompts[0]), sum(lengths))
    text = bytearray()
    for section in _sections(fields, prompts[0], marked=marked):
        text += section
        if len(text) >= MAX_KEYED_BYTES:
            break
    else:
        size = len(text) + sum(
            len(prompt) for prompt in prompts[1:] if isinstance(prompt, str)
        )
    keys = _chained(root, bytes(text[:MAX_KEYED_BYTES]))
    return PromptKeys(keys, -(-size // TOKEN_BYTES))


def _prompts(value: Any) -> list[Any]:
    """The prompts of a field that takes one or several: at least one. Items of a
    conversation are one.
    """
    is_list = isinstance(value, list) and value and type(value[0]) in (str, list)
    return value if is_list else [value]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int


def _id_keys(root: Key, ids: list[Any]) -> Keys:
    try:
        array("I", ids)
    except (TypeError, OverflowError):
        return ()  # its backend refuses it
    return block_keys(root, ids[: MAX_KEYED_BYTES // TOKEN_BYTES], BLOCK_TOKENS)


def _sections(fields: RequestFields, prompt: Any, *, marked: bool) -> Iterator[bytes]:
    """The prompt's text in parts, in the order of chat templates."""
    items = prompt if isinstance(prompt, list) else [prompt]
    messages = fields.messages if isinstance(fields.messages, list) else []
    system, tools = _system(fields.system), _tools(fields.tools)
    turns = map(_with_text, [*messages, *items])
    for section in (system, fields.instructions, tools, *turns):
        if isinstance(section, str):
            yield section.encode("utf-8", "surrogatepass")
        elif section is not None:
            yield _canonical.encode(_without_marks(section) if marked else section)


def _system(system: Any) -> Any:
    """Instructions without Claude Code's block about billing."""
    first = system[0] if isinstance(system, list) and system else None
    text = first.get("text") if isinstance(first, dict) else None
    billing = isinstance(text, str) and text.startswith(BILLING_PREFIX)
    return system[1:] if billing else system


def _tools(tools: Any) -> Any:
    """Tools that are at the front of the prompt."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_deferred(tool)]


def _is_deferred(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("defer_loading") is True


def _without_marks(value: Any) -> Any:
    """A part of a body without marks of caching."""
    if isinstance(value, dict):
        return {k: _without_marks(v) for k, v in value.items() if k != _CACHE_MARK}
    return (
        [_without_marks(element) for element in value]
        if isinstance(value, list)
        else value
    )


def _with_text(message: Any) -> Any:
    """A message whose content is a text, if it is a list of one."""
    content = message.get("content") if isinstance(message, dict) else None
    only = content[0] if isinstance(content, list) and len(content) == 1 else None
    if not isinstance(only, dict) or only.keys() - {_CACHE_MARK} != {"type", "text"}:
        return message
    return {**message, "content": only["text"]}


def _chained(parent: Key, text: bytes) -> Keys:
    """The keys of all full blocks of a text."""
    keys = []
    for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
        parent = sha256(parent + text[end - BLOCK_BYTES : end]).digest()
        keys.append(parent)
    return tuple(keys)


def _name(value: Any) -> str:
    """A short text that a client chose; of others, nothing."""
    return value[:_MAX_NAME_CHARS] if isinstance(value, str) else ""
