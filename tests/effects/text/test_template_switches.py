"""Which variables turn thinking on and off is found by rendering."""

from typing import Any

import pytest
from attrs import define, field

from minfer.effects.text.template_switches import TemplateSwitches, template_switches

END = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@define
class Templates:
    with_tools: str | None = None
    names: tuple[str, ...] = ()


@define
class OneTemplate:
    """A tokenizer, as far as templates need it."""

    chat_template: str
    templates: Templates = field(factory=Templates)
    special_tokens: dict[str, str] = field(factory=dict)


def switches(template: str) -> TemplateSwitches:
    tokenizer: Any = OneTemplate(END + template)
    return template_switches(tokenizer, tools=False)


@pytest.mark.parametrize(
    "template",
    [
        # Qwen3, and GLM
        (
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
            "{% endif %}"
        ),
        # Granite, DeepSeek V3.1 and Kimi
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
        # MiniMax M3
        "{% if thinking_mode == 'disabled' %}</think>{% endif %}",
        # Seed-OSS
        "{% if thinking_budget == 0 %}no budget{% endif %}",
    ],
)
def test_a_variable_is_a_switch(template: str) -> None:
    found_switches = switches(template)
    assert found_switches.on is not None
    assert found_switches.off is not None
    assert found_switches.efforts == {}


@pytest.mark.parametrize(
    ("template", "effort"),
    [
        # Command A
        (
            "{% if (reasoning_effort or 'high') == 'none' %}off{% else %}on{% endif %}",
            "none",
        ),
        # Hunyuan 3
        (
            (
                "{% if reasoning_effort not in ['no_think', 'low', 'high'] %}"
                "{{ raise_exception('unknown') }}{% endif %}{{ reasoning_effort }}"
            ),
            "no_think",
        ),
    ],
)
def test_an_effort_may_be_the_switch(template: str, effort: str) -> None:
    found_switches = switches(template)
    assert found_switches.off is not None
    assert found_switches.off["reasoning_effort"] == effort
    assert found_switches.on is not None
    assert found_switches.on["reasoning_effort"] == "high"


def test_an_effort_that_is_only_written_is_no_switch() -> None:
    template = "Reasoning: {{ reasoning_effort | default('medium') }}"  # gpt-oss
    found_switches = switches(template)
    assert (found_switches.on, found_switches.off) == (None, None)
    assert found_switches.efforts["xhigh"]["reasoning_effort"] == "xhigh"


def test_an_effort_that_is_refused_is_the_nearest_one() -> None:
    refuse = (
        "{% if thinking_effort is defined and thinking_effort not in ['low', 'high'] %}"
    )
    found_switches = switches(
        refuse + "{{ raise_exception('no') }}{% endif %}{{ thinking_effort }}"
    )
    efforts = {
        name: values["thinking_effort"] for name, values in found_switches.efforts.items()
    }
    assert efforts == {
        "low": "low",
        "medium": "high",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }


def test_a_template_without_switches() -> None:
    assert switches("") == TemplateSwitches(on=None, off=None, efforts={})
