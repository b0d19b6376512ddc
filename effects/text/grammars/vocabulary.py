"""A vocabulary whose markers have no text.

Where a grammar leaves one text only, the compiler asks the tokenizer how to split it. A
text with a marker in it, as `</tool_call>`, would be split into that marker's own token,
which is no text for the compiler: it would end with an error, or at an end of sequence as
if it were over. So the tokenizer that it gets does not know their texts. They have other
names in it, and grammars refer to them by id.
"""

import json
from typing import Any

from attrs import frozen


@frozen
class Vocabulary:
    """A tokenizer.json, as text, and the ids of the tokens that are renamed in it."""

    text: str
    ids: dict[str, int]  # by the names that they had


def without_markers(tokenizer: str) -> Vocabulary:
    """A tokenizer that splits the texts of markers as any others. Raises whatever there
    is to say of a text that holds no tokenizer.
    """
    told = json.loads(tokenizer)
    model = told["model"]
    ids = {}
    for one in told.get("added_tokens") or ():
        name = one["content"]
        if one["special"] or (name.startswith("<") and name.endswith(">")):
            one["content"], one["special"] = f"<|no text: {one['id']}|>", True
            ids[name] = one["id"]
            _rename(model, name, one["content"])
    return Vocabulary(json.dumps(told), ids)


def _rename(model: dict[str, Any], name: str, new: str) -> None:
    """Give a token another name in the model, which may know it as well."""
    words = model["vocab"]
    if isinstance(words, dict) and name in words:
        words[new] = words.pop(name)
    elif isinstance(words, list):  # of names with their scores
        model["vocab"] = [[new, *one[1:]] if one[0] == name else one for one in words]
    if model.get("unk_token") == name:
        model["unk_token"] = new
