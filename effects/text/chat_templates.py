"""Chat templates: messages become the text that the model was trained to continue.

`template_rendering` renders once. This module converts messages to the form that the
template supports.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final, TypedDict

from minfer.effects.text.message_checks import message_error
from minfer.effects.text.system_messages import place_system_messages
from minfer.effects.text.template_cache import cached_by_template
from minfer.effects.text.template_messages import (
    Message,
    join_lines,
    list_probe,
    message_forms,
    read_message,
    shows_texts,
    without_null,
)
from minfer.effects.text.template_probe import TemplateProbe
from minfer.effects.text.template_rendering import (
    ChatTemplateError as ChatTemplateError,
)

if TYPE_CHECKING:
    from minfer.effects.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
Conversations = Conversation | Sequence[Conversation]
Tools = Sequence[Mapping[str, Any]]  # JSON descriptions of functions
# Names that cannot be a template's variables: each has a field.
RESERVED_NAMES: Final = frozenset(
    {"chat_template", "chat_template_kwargs", "messages", "tokenize", "tools"}
)
# Names that a request may set, and the default for all requests may not.
PER_REQUEST_NAMES: Final = frozenset({"add_generation_prompt", "continue_final_message"})
_NULL: Final = "None"
_CONTINUATION_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG"


class ChatOptions(TypedDict, total=False):
    """Options of rendering a conversation; names and defaults are vLLM's."""

    tools: Tools | None
    add_generation_prompt: bool  # default: true
    continue_final_message: bool  # default: false; true leaves the last message open
    chat_template_kwargs: (
        Mapping[str, Any] | None
    )  # anything else that the template understands


def conversations(messages: Conversations) -> list[Conversation]:
    """One conversation or several, as a list. Raises ChatTemplateError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise ChatTemplateError(f"messages must be a list of messages, not a {kind}")
    is_batch = messages and all(isinstance(entry, list | tuple) for entry in messages)
    # `is_batch` has checked it.
    return list(messages) if is_batch else [messages]  # type: ignore[arg-type, list-item]


def render_chat(
    tokenizer: "Tokenizer | None", messages: Conversation, options: ChatOptions
) -> str:
    """A conversation (messages with `role` and `content`) through the tokenizer's chat
    template.

    Encode the text with `add_special_tokens=False`: templates write their own. Raises
    ChatTemplateError, with the template's own message if it raised.
    """
    if unknown := options.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"chat has no option {min(unknown)!r}; see chat_template_kwargs")
    if tokenizer is None:
        raise ChatTemplateError(
            "a conversation needs the tokenizer; leave skip_tokenizer_init out"
        )
    values = template_values(options)
    template = chosen_template(tokenizer, with_tools=values["tools"] is not None)
    if not messages:
        raise ChatTemplateError("there are no messages; give at least one")
    continues = values.pop("continue_final_message", False)
    if continues and values["add_generation_prompt"]:
        exclusive = "add_generation_prompt and continue_final_message"
        raise ChatTemplateError(
            f"{exclusive} exclude each other; set one of them to false"
        )
    tokens = tokenizer.special_tokens
    probe = TemplateProbe(template, tuple(tokens.items()), values["tools"] is not None)
    takes_lists = partial(_takes_lists, probe)
    chat = place_system_messages(
        list(starmap(_read_valid_message, enumerate(messages))), probe
    )
    chat = [join_lines(message, takes_lists) for message in chat]
    if continues:
        chat[-1] = _with_continuation_mark(chat[-1])
    text = _render_accepted_form(probe, chat, values)
    return _cut_at_mark(text) if continues else text


def chosen_template(tokenizer: "Tokenizer", *, with_tools: bool) -> str:
    """The template for a conversation. Raises ChatTemplateError if there is none."""
    templates = tokenizer.templates
    if with_tools and templates.with_tools is not None:
        return templates.with_tools
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if templates.names:
        names = ", ".join(templates.names)
        raise ChatTemplateError(
            f"this model's chat templates are named {names}, and none is the default; "
            f"name one of them `default`, or write it to chat_template.jinja"
        )
    files = "chat_template.jinja or tokenizer_config.json"
    remedy = "use a plain prompt, or a model made for chat"
    raise ChatTemplateError(f"this model has no chat template ({files}); {remedy}")


def template_values(options: ChatOptions) -> dict[str, Any]:
    """The values that a template gets besides messages and tokens."""
    values: dict[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    variables = options.get("chat_template_kwargs") or {}
    check_names(variables, "chat_template_kwargs", RESERVED_NAMES)
    values |= {**options, **variables}
    values.pop("chat_template_kwargs", None)
    return values


def check_names(
    variables: Mapping[str, Any], setting: str, reserved: frozenset[str]
) -> None:
    """Raise ChatTemplateError if variables of a template, of this `setting`, have a name
    that is reserved.
    """
    for name in variables:
        if name in reserved:
            reason = f"{setting} cannot set {name!r}; leave it out"
            raise ChatTemplateError(reason, setting)


def _with_continuation_mark(message: Message) -> Message:
    """The message that is to be continued, with a mark after its text."""
    content = message.get("content", ())
    if content is None or isinstance(content, str):
        return {**message, "content": f"{content or ''}{_CONTINUATION_MARK} "}
    last = content[-1] if isinstance(content, list | tuple) and content else None
    if isinstance(last, Mapping) and isinstance(last.get("text"), str):
        text_part = {**last, "text": f"{last['text']}{_CONTINUATION_MARK} "}
        return {**message, "content": [*(content or ())[:-1], text_part]}
    requirement = "a last message whose content is text"
    raise ChatTemplateError(f"continue_final_message needs {requirement}")


def _cut_at_mark(text: str) -> str:
    """The rendered text, without the template's text after the last message."""
    text, mark, rest = text.rpartition(_CONTINUATION_MARK)
    if not mark:
        reason = "the template does not show the last message; set it to false"
        raise ChatTemplateError(f"continue_final_message is set, but {reason}")
    # A template that strips messages took the tag's space, so it stripped the message's
    # end too.
    return text if rest.startswith(" ") else text.rstrip()


def _render_accepted_form(
    probe: TemplateProbe, chat: list[Message], values: dict[str, Any]
) -> str:
    """A conversation in the first of its forms that the template accepts."""

    def render(form: list[Message]) -> str:
        return probe.render(form, values)

    first_error: ChatTemplateError | None = None
    for form in message_forms(chat):
        try:
            text = render(form)
        except ChatTemplateError as error:
            first_error = first_error or error
            continue
        if not _writes_null(text, form, render):
            return text
    if first_error is None:
        raise AssertionError("a conversation without null is among its forms")
    raise first_error


def _writes_null(
    text: str, chat: list[Message], render: Callable[[list[Message]], str]
) -> bool:
    """Whether a template may have written null as a word, as Python spells it, and not
    only such words of the messages, the tools or its own.
    """
    nulls = text.count(_NULL)
    if not any(message.get("content", "") is None for message in chat):
        return False
    if nulls <= json.dumps(chat).count(_NULL):
        return False
    try:
        return nulls > render([*map(without_null, chat)]).count(_NULL)
    except ChatTemplateError:
        return True


@cached_by_template
def _takes_lists(probe: TemplateProbe, role: str) -> bool:
    """Whether a template reads content as a list of texts, in messages of a role."""
    text = probe.text(list_probe(role))
    return text is not None and shows_texts(text)


def _read_valid_message(index: int, message: Any) -> Message:
    """A message in its first form. Raises ChatTemplateError if it cannot be read."""
    if (error := message_error(message)) is not None:
        raise ChatTemplateError(f"messages[{index}]{error}")
    return read_message(message)
