"""System messages at the places where a chat template shows them.

A conversation may begin with several system messages, and have more of them later on.
Many templates show only the first of several, or only the last, or refuse them, without
an error in the first two cases. What a template does is found by rendering probes, once a
template:

* Where it does not show two leading messages, their texts become one message.
* Where it shows no system message at all, a leading one is a marked user turn.
* A later message stays where it is: as it is, where the template shows it there, or else
  as a marked user turn. At the front it would change the prefix of every later turn, and
  the prefix cache would not hold.

A marked user turn is `<system-message>`, the text, and `</system-message>`, in lines of
their own. It joins a user turn beside it, as many templates refuse two in a row. A user
turn after the result of a tool, marked or not, joins the result where the template
refuses it there, as Mistral's do.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from minfer.effects.text.template_cache import are_of_requests, cached_by_template
from minfer.effects.text.template_messages import TOOL_CALL, TOOL_RESULT, Message
from minfer.effects.text.template_probe import TemplateProbe

_SYSTEM: Final[Message] = {"role": "system", "content": "probe of a leading message"}
_LATER_SYSTEM: Final[Message] = {"role": "system", "content": "probe of another message"}
_USER: Final[Message] = {"role": "user", "content": "probe of a question"}
_ASSISTANT: Final[Message] = {"role": "assistant", "content": "probe of an answer"}
_NEXT_USER: Final[Message] = {"role": "user", "content": "probe of the next question"}
_MARKED_TURN: Final = "a user turn in <system-message> tags, at its place"
_log: Final = logging.getLogger("minfer.templates")


def place_system_messages(chat: Sequence[Message], probe: TemplateProbe) -> list[Message]:
    """A conversation whose system messages are all shown by the probed template."""
    chat = [_as_system(message) for message in chat]
    if any(map(_is_system, chat)):
        chat = _place(chat, probe)
    return _with_joined_results(chat, probe)


def _place(chat: list[Message], probe: TemplateProbe) -> list[Message]:
    is_system = list(map(_is_system, chat))
    num_leading = is_system.index(False) if False in is_system else len(chat)
    front, rest = chat[:num_leading], chat[num_leading:]
    if front and not _shows_leading(probe):
        _log_once(probe, f"no system messages; each becomes {_MARKED_TURN}")
        front, rest = [], chat
    elif len(front) > 1 and not _shows_several(probe):
        finding = "only one leading system message; the texts of others join it"
        _log_once(probe, finding)
        front = [{**front[0], "content": "\n\n".join(map(_text, front))}]
    if any(map(_is_system, rest)) and not (_shows_leading(probe) and _shows_later(probe)):
        finding = f"no system messages behind others; each becomes {_MARKED_TURN}"
        _log_once(probe, finding)
        rest = _with_marked_turns(rest)
    return [*front, *rest]


# --- what a template shows ----------------------------------------------------------


@cached_by_template
def _shows_leading(probe: TemplateProbe) -> bool:
    """Whether a template shows a system message at the front, wherever it shows a
    conversation without one: Mistral Nemo's moves it to the last user turn, and loses it
    when a tool has answered.
    """
    chats = ([_USER], [_USER, _ASSISTANT, _NEXT_USER], [_USER, TOOL_CALL, TOOL_RESULT])
    shown = filter(probe.shows, chats)
    return all(probe.shows([_SYSTEM, *chat]) for chat in shown)


@cached_by_template
def _shows_several(probe: TemplateProbe) -> bool:
    """Whether it shows two of them."""
    return probe.shows([_SYSTEM, _LATER_SYSTEM, _USER])


@cached_by_template
def _shows_later(probe: TemplateProbe) -> bool:
    """Whether it shows system messages after others, whatever follows."""
    tool_use = [_USER, TOOL_CALL, TOOL_RESULT]
    places = [
        [_SYSTEM, _USER, _LATER_SYSTEM],
        [_SYSTEM, _USER, _LATER_SYSTEM, _ASSISTANT, _NEXT_USER],
        [_SYSTEM, _USER, _ASSISTANT, _LATER_SYSTEM, _NEXT_USER],
        [_USER, _LATER_SYSTEM, _ASSISTANT, _NEXT_USER],
        *(
            [[_SYSTEM, *tool_use, _LATER_SYSTEM]]
            if probe.text(tool_use) is not None
            else []
        ),
    ]
    mark = _LATER_SYSTEM["content"]
    ends, goes_on = (str(probe.text(chat)).partition(mark)[0] for chat in places[:2])
    return ends == goes_on and all(map(probe.shows, places))


@cached_by_template
def _shows_user_after_tool(probe: TemplateProbe) -> bool:
    """Whether it shows a user turn after a tool's result, if it shows results."""
    tool_use = [_USER, TOOL_CALL, TOOL_RESULT]
    return not probe.shows(tool_use) or probe.shows([*tool_use, _NEXT_USER])


# --- marked turns -------------------------------------------------------------------


def _with_joined_results(chat: list[Message], probe: TemplateProbe) -> list[Message]:
    """A conversation without user turns after results, if the template refuses them."""
    roles = [message.get("role") for message in chat]
    if ("tool", "user") not in pairwise(roles) or _shows_user_after_tool(probe):
        return chat
    joined: list[Message] = []
    for message in chat:
        after_result = joined and joined[-1].get("role") == "tool"
        if after_result and message.get("role") == "user":
            joined[-1] = _with_text(joined[-1], [], [_text(message)])
        else:
            joined.append(message)
    return joined


def _with_marked_turns(chat: Sequence[Message]) -> list[Message]:
    """A conversation whose system messages are marked user turns."""
    placed: list[Message] = []
    pending: list[str] = []  # marked texts that join the next user turn
    for index, message in enumerate(chat):
        role = message.get("role")
        previous = placed[-1].get("role") if placed else None
        if role == "system":
            text = _marked(_text(message))
            following = chat[index + 1].get("role") if index + 1 < len(chat) else None
            if previous == "user":
                placed[-1] = _with_text(placed[-1], [], [text])
            elif following in ("user", "system"):
                pending.append(text)
            else:
                placed.append({"role": "user", "content": "\n\n".join([*pending, text])})
                pending = []
        elif role == "user" and pending:
            placed.append(_with_text(message, pending, []))
            pending = []
        else:
            placed.append(message)
    return placed


def _marked(text: str) -> str:
    return f"<system-message>\n{text}\n</system-message>"


def _with_text(message: Message, before: list[str], after: list[str]) -> Message:
    """A message with texts before and after its own."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content_parts = [
            *({"type": "text", "text": text} for text in before),
            *content,
            *({"type": "text", "text": text} for text in after),
        ]
        return {**message, "content": content_parts}
    own_texts = [str(content)] if content else []
    return {**message, "content": "\n\n".join([*before, *own_texts, *after])}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):
        texts = [entry.get("text", "") for entry in content if isinstance(entry, Mapping)]
        return "\n".join(texts)
    return str(content or "")


def _as_system(message: Message) -> Message:
    """A message of a developer, by the role for which models were trained."""
    return (
        {**message, "role": "system"} if message.get("role") == "developer" else message
    )


@cached_by_template
def _log_once(_: TemplateProbe, finding: str) -> None:
    if not are_of_requests():
        _log.warning("the chat template shows %s", finding)


def _is_system(message: Message) -> bool:
    return message.get("role") == "system"
