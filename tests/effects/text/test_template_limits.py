"""No value that a client chooses keeps a template busy, or makes it large."""

from typing import Any

import pytest

from minfer.effects.text.chat_templates import ChatTemplateError, render_chat
from minfer.effects.text.template_limits import MAX_LOOP_ROUNDS, MAX_PRODUCT_LENGTH
from minfer.effects.text.tokenizer import Tokenizer
from tests.quick import at_most

EMITTED = [{"role": "user", "content": "x"}]


def render(tokenizer: Tokenizer, template: str, **values: Any) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, EMITTED, {"chat_template_kwargs": values})


NESTED = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ n }}"


def test_loops_of_all_levels_are_counted_together(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, NESTED, n=300) == "300"
    message = f"more than {MAX_LOOP_ROUNDS} times"
    # 10 ms on an idle machine
    with at_most(1), pytest.raises(ChatTemplateError, match=message):
        render(tokenizer, NESTED, n=99_999)
    assert render(tokenizer, NESTED, n=300) == "300"  # each rendering anew


def test_a_request_cannot_replace_range(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, NESTED, n=2, range=7) == "2"


@pytest.mark.parametrize("template", ["{{ 'ab' * n }}", "{{ n * [1, 2] }}"])
def test_products_are_bounded(tokenizer: Tokenizer, template: str) -> None:
    assert len(render(tokenizer, template, n=3)) > 5
    with pytest.raises(ChatTemplateError, match="repeats something"):
        render(tokenizer, template, n=MAX_PRODUCT_LENGTH)


def test_powers_are_bounded(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, "{{ n ** 3 * 2 }}", n=3) == "54"
    assert render(tokenizer, "{{ 2.0 ** n }}", n=3) == "8.0"
    with pytest.raises(ChatTemplateError, match="too high a power"):
        render(tokenizer, "{{ n ** n }}", n=99_999)
