"""One rendering of a chat template, in a sandbox.

A template comes with the checkpoint and is not trusted: it runs in jinja2's immutable
sandbox, is bounded in what it does (`template_limits`), and sees plain JSON values only.
Otherwise the environment is as in transformers, so that templates render alike.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.utils import Namespace

from minfer.effects.text.template_cache import TEMPLATES
from minfer.effects.text.template_limits import BoundedSandbox, LoopBudget
from minfer.effects.text.template_messages import Message, VerbatimText, mark_verbatim

# Marks training targets in some templates; here it is only a block with a scope of its
# own.
_GENERATION: Final = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


class ChatTemplateError(ValueError):
    """A chat template is missing, broken, or refuses these messages; `param` is the field
    of the request that is wrong, if it is not that of the messages.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def render_template(
    template: str,
    messages: Sequence[Message],
    tokens: Mapping[str, str],
    values: Mapping[str, Any],
) -> str:
    """The text of messages; `tokens` are the special tokens, and `values` the template's
    other variables. Raises ChatTemplateError.
    """
    try:
        # Values come before tokens of the same name, as in transformers.
        variables = {**tokens, **_plain(values), "range": LoopBudget().range}
        variables["messages"] = mark_verbatim(_plain(messages))
        return _compile(template).render(variables)
    except RecursionError as error:
        raise ChatTemplateError(
            "the chat template recurses without end; correct it"
        ) from error
    except TemplateError as error:  # its own message, or jinja2's
        message = (
            f"the chat template failed: {error}; correct the messages or the template"
        )
        raise ChatTemplateError(message) from error
    except Exception as error:  # a template is a program: it may fail in any way
        # Python's message may contain more than these messages.
        kind = type(error).__name__
        message = (
            f"the chat template failed ({kind}); correct the messages or the template"
        )
        raise ChatTemplateError(message) from error


def check_syntax(template: str) -> None:
    """Raise ChatTemplateError, which names the line, if a template cannot be compiled."""
    try:
        _compile(template)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # of jinja2, or of Python's own compiler
        kind = type(error).__name__
        raise ChatTemplateError(f"it cannot be compiled ({kind})") from error


def _plain(value: Any) -> Any:
    """The value rebuilt from JSON types: other objects have methods that the sandbox
    cannot check.
    """

    def inert(foreign: object) -> object:
        return (
            dict(foreign)
            if isinstance(foreign, Mapping)
            else f"<{type(foreign).__name__}>"
        )

    return json.loads(json.dumps(value, default=inert))


def _compile(template: str) -> Template:
    return TEMPLATES.get(template, _compile, partial(_compile_anew, template))


def _compile_anew(template: str) -> Template:
    env = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise,
        # The local day.
        strftime_now=lambda pattern: datetime.now().strftime(pattern),  # noqa: DTZ005
        # The class itself has attributes that lead out of the sandbox.
        dict=lambda *args, **values: dict(*args, **values),
        namespace=_Namespace,
    )
    return env.from_string(_GENERATION.sub(r"{%\1 \2with \3%}", template))


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, VerbatimText):
        return str(value)
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Namespace(Namespace):
    """`namespace(...)` that takes no names with a leading underscore, as transformers'
    does.
    """

    def __init__(*args: Any, **values: Any) -> None:  # so that `self=` is a name too
        self = args[0]
        Namespace.__init__(self)
        for name, value in dict(*args[1:], **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a template cannot store {name!r} in a namespace")
        super().__setitem__(name, value)
