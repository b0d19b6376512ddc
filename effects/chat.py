"""Chat templates: messages become the text that the model was trained to continue.

A template comes with the checkpoint and is not trusted: it runs in jinja2's immutable sandbox and
sees plain JSON values only. The environment is transformers' own, so that templates render alike.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from minfer.effects.text import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
Conversations = Conversation | Sequence[Conversation]
_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(ValueError):
    """A chat template is missing, broken, or refuses these messages."""


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt; names and defaults are vLLM's."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool  # default: true
    continue_final_message: bool  # default: false
    chat_template_kwargs: Mapping[str, Any] | None  # anything else that the template understands


def conversations(messages: Conversations) -> list[Conversation]:
    """One conversation or several, as a list. Raises ChatTemplateError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise ChatTemplateError(f"messages must be a list of messages, not a {kind}")
    several = messages and all(isinstance(one, list | tuple) for one in messages)
    return list(messages) if several else [messages]  # type: ignore[arg-type, list-item]  # so it is


def conversation_text(
    tokenizer: "Tokenizer | None", messages: Conversation, how: ChatOptions
) -> str:
    """A conversation through the tokenizer's chat template. Raises ChatTemplateError."""
    if strange := how.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"chat has no option {min(strange)!r}; see chat_template_kwargs")
    if tokenizer is None:
        raise ChatTemplateError("a conversation needs the tokenizer; leave skip_tokenizer_init out")
    values: dict[str, Any] = {**how, **(how.get("chat_template_kwargs") or {})}
    values.pop("chat_template_kwargs", None)
    if taken := {"template", "messages", "special_tokens"} & values.keys():
        raise ChatTemplateError(f"chat_template_kwargs cannot set {min(taken)!r}; leave it out")
    special = tokenizer.special_tokens
    return render_chat(tokenizer.chat_template, messages, special_tokens=special, **values)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    **values: Any,
) -> str:
    """Render `messages` (each with `role` and `content`) through a checkpoint's template.

    `continue_final_message` leaves the last message open, for the model to go on with it. Encode
    the result with `add_special_tokens=False`: templates write their own. Raises
    `ChatTemplateError`, with the template's own words if it raised.
    """
    if template is None:
        raise ChatTemplateError(
            "this model has no chat template (chat_template.jinja or "
            "tokenizer_config.json); use a plain prompt, or a model made for "
            "chat"
        )
    if not messages:
        raise ChatTemplateError("there are no messages; give at least one")
    if add_generation_prompt and continue_final_message:
        raise ChatTemplateError(
            "add_generation_prompt and continue_final_message exclude each "
            "other; set one of them to false"
        )
    chat = [_message(message) for message in messages]
    if continue_final_message:
        if not isinstance(chat[-1].get("content"), str):
            raise ChatTemplateError(
                "continue_final_message needs a last message whose content is text"
            )
        chat[-1]["content"] += _END
    try:
        text = _compile(template).render(
            messages=chat,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **dict(special_tokens or {}),
            **_plain(values),
        )
    except RecursionError as error:
        raise ChatTemplateError("the chat template recurses without end; correct it") from error
    except Exception as error:  # a template is a program: it may fail in any way
        raise ChatTemplateError(
            f"the chat template failed: {error}; correct the messages or the template"
        ) from error
    return _cut(text) if continue_final_message else text


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without absent fields: templates ask whether a field is there, not whether null."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"a message must be an object with role and content, found {type(message).__name__}"
        )
    return {str(k): _plain(v) for k, v in message.items() if v is not None}


def _cut(text: str) -> str:
    """Drop what the template put behind the last message."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message is set, but the template does not show the "
            "last message; set it to false"
        )
    # A template that strips messages took the tag's space, so it stripped the message's end too.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _plain(value: Any) -> Any:
    """The value rebuilt out of JSON types: other objects have methods the sandbox cannot judge."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return env.from_string(template)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local day


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """{% generation %} marks training targets in some templates; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> Node:
        """Parse the block and keep its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` without the class behind it, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **values: Any) -> dict[str, Any]:
        return dict(*args, **values)


class _Namespace(Namespace):
    """`namespace(...)` that takes no names with a leading underscore, as transformers' does."""

    def __init__(*args: Any, **values: Any) -> None:  # so that `self=` is a name too
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot store {name!r} in a namespace")
