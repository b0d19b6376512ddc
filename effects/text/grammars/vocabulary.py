"""A vocabulary whose markers have no text.

Where a grammar allows only one text, the compiler asks the tokenizer how to split it. A
text with a marker in it, such as `</tool_call>`, would be split into that marker's own
token, which is no text for the compiler: it would end with an error, or at an end of
sequence as if it were complete. So its tokenizer does not have the markers' texts. They
have other names in it, and grammars refer to them by id.
"""

import json
from typing import Any

from attrs import frozen


@frozen
class GrammarVocabulary:
    """A tokenizer.json, as text, and the ids of the tokens that are renamed in it."""

    text: str
    ids: dict[str, int]  # by the names that they had


def without_markers(tokenizer: str) -> GrammarVocabulary:
    """A tokenizer that splits the texts of markers like any others. Raises various errors
    for a text that holds no tokenizer.
    """
    data = json.loads(tokenizer)
    ids, names = dict[str, int](), dict[str, str]()
    for token in data.get("added_tokens") or ():
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            token["content"], token["special"] = f"<|no text: {token['id']}|>", True
            ids[name], names[name] = token["id"], token["content"]
    _rename(data["model"], names)
    return GrammarVocabulary(json.dumps(data), ids)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give tokens other names in the model, which may know them as well."""
    words = model["vocab"]
    if isinstance(words, dict):
        for name, new in names.items():
            if name in words:
                words[new] = words.pop(name)
    else:  # a list of names with their scores
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in words]
    if (unknown_token := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown_token]
