"""Messages in the form for chat templates, whatever their form in a request.

HTTP's bodies and Python's callers pass the same messages. Forms that depend on the
template are chosen here, for all of them:

* Content in several texts is a list where the template reads lists in messages of that
  role, as in transformers. For other templates the texts are lines of one.
* A text is a list of one where the template shows texts in lists alone, as transformers'
  processors of multimodal models have it.
* Arguments of calls are objects. Text that is no JSON object, as of an incomplete call,
  is unchanged, and `tojson` writes it so, too.
* Where a template fails on null, on arguments of a kind, or on several calls at once,
  other forms are tried: `message_forms`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_FIRST: Final = "first of two"
_SECOND: Final = "second of two"
_USER: Final[Message] = {"role": "user", "content": "hi"}
TOOL_CALL: Final[Message] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "f", "arguments": {}},
        }
    ],
}
TOOL_RESULT: Final[Message] = {
    "role": "tool",
    "tool_call_id": "call00000",
    "name": "f",
    "content": "result of f",
}


class VerbatimText(str):
    """Arguments of a call that are text: the template must write them unchanged."""

    __slots__ = ()


def read_message(message: Mapping[str, Any]) -> Message:
    """A message with arguments as objects, reasoning under all its names, and without
    absent fields: templates test whether a field is there. An assistant's missing content
    is null, which `message_forms` leaves out first.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    thought = next((fields[name] for name in _REASONING if name in fields), None)
    if thought is not None:  # as in transformers: gpt-oss reads `thinking`
        fields = {"thinking": thought, **fields, "reasoning_content": thought}
    if fields.get("role") == "assistant" and "content" in message:
        fields.setdefault("content", None)
    return _with_arguments(fields, _parse_arguments)


def join_lines(message: Message, takes_lists: Callable[[str], bool]) -> Message:
    """A message; a list of texts becomes one text if the template reads no lists."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or not all(map(_is_text, content)):
        return message
    if takes_lists(str(message.get("role"))):
        return message
    return {
        **message,
        "content": "\n".join([content_part["text"] for content_part in content]),
    }


def list_probe(role: str) -> list[Message]:
    """A conversation with a list of texts in a message of this role."""
    content_parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
    message = {"role": role, "content": content_parts}
    match role:
        case "system":
            return [message, _USER]
        case "tool":
            return [_USER, TOOL_CALL, {**TOOL_RESULT, **message}]
        case "assistant":
            return [_USER, message, _USER]
    return [message]


def text_probe(role: str) -> list[Message]:
    """The conversation of `list_probe`, the first of its texts in place of the list."""
    chat = list_probe(role)
    for message in chat:
        if isinstance(message["content"], list):
            message["content"] = _FIRST
    return chat


def shows_text(rendered: str) -> bool:
    """Whether the rendered `text_probe` has its text."""
    return _FIRST in rendered


def in_list(message: Message) -> Message:
    """A message whose text is a list of one."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def shows_texts(rendered: str) -> bool:
    """Whether the rendered `list_probe` has its texts as texts: some templates write a
    list as Python does.
    """
    quoted = (f"'{_FIRST}'", f'"{_FIRST}"')
    shows_both = _FIRST in rendered and _SECOND in rendered
    return shows_both and not any(text in rendered for text in quoted)


def message_forms(chat: Sequence[Message]) -> Iterator[list[Message]]:
    """A conversation in the forms that templates may accept, the best one first; the last
    one is for templates that refuse several calls at once, by an error of their own.
    """
    tried: list[list[Message]] = []
    for change in (_without_content, _unchanged, without_null, _with_text, _with_objects):
        form = [change(message) for message in chat]
        if form not in tried:
            tried.append(form)
            yield form
    plain = [without_null(message) for message in chat]
    if (separate := [*_with_single_calls(plain)]) != plain:
        yield separate


def without_null(message: Message) -> Message:
    """Without content that is null: it is no text."""
    null = "content" in message and message["content"] is None
    return {**message, "content": ""} if null else message


def mark_verbatim(chat: Sequence[Message]) -> list[Message]:
    """A conversation whose text arguments are `VerbatimText`."""
    return [_with_arguments(message, _as_verbatim) for message in chat]


def _is_text(content_part: Any) -> bool:
    return (
        isinstance(content_part, Mapping)
        and content_part.get("type") == "text"
        and isinstance(content_part.get("text"), str)
    )


# --- forms ------------------------------------------------------------------------------


def _unchanged(message: Message) -> Message:
    return message


def _without_content(message: Message) -> Message:
    """Without content that is null, as in transformers."""
    return {name: value for name, value in message.items() if value is not None}


def _with_text(message: Message) -> Message:
    """With arguments as text, for DeepSeek's templates: these test whether content is
    null.
    """
    if "tool_calls" not in message:
        return without_null(message)
    content = message.get("content") or None
    return _with_arguments({**message, "content": content}, _text_of)


def _with_objects(message: Message) -> Message:
    """With arguments as objects only: other values are put into one."""
    return _with_arguments(without_null(message), _wrap_in_object)


def _with_single_calls(chat: Sequence[Message]) -> Iterator[Message]:
    """With one call in each message, and its results after it: some templates refuse
    several.
    """
    moved: set[int] = set()  # positions of results
    for position, message in enumerate(chat):
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            if position not in moved:
                yield message
            continue
        results = _results_after(chat, position)
        empty_message = {"role": message.get("role"), "content": ""}
        ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
        for index, call in enumerate(calls):
            yield {**(message if index == 0 else empty_message), "tool_calls": [call]}
            own_results = results.get(ids[index], [])
            # Of calls with one id, each has one result, and the last one the others.
            number = 1 if ids[index] in ids[index + 1 :] else len(own_results)
            for result_position in own_results[:number]:
                moved.add(result_position)
                yield chat[result_position]
            del own_results[:number]


def _results_after(chat: Sequence[Message], position: int) -> dict[Any, list[int]]:
    """The positions of the results of a message's calls, by the id of the call: those up
    to the next answer, as clients may use an id again.
    """
    results: dict[Any, list[int]] = {}
    for index in range(position + 1, len(chat)):
        if chat[index].get("role") == "assistant":
            break
        if chat[index].get("role") == "tool":
            results.setdefault(chat[index].get("tool_call_id"), []).append(index)
    return results


# --- arguments --------------------------------------------------------------------------


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """A message in whose calls arguments are changed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_change_call(call, change) for call in calls]}


def _change_call(call: Any, change: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = change(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Any) -> Any:
    """The object in a text, if it is one that can be sent on."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _text_of(arguments: Any) -> Any:
    if not isinstance(arguments, Mapping):
        return arguments
    return json.dumps(dict(arguments), ensure_ascii=False, default=dict)


def _wrap_in_object(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _as_verbatim(arguments: Any) -> Any:
    return VerbatimText(arguments) if isinstance(arguments, str) else arguments
