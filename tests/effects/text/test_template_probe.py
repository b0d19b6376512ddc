"""A probe shows what a template writes, and whether it is all there in order."""

from minfer.effects.text.template_probe import TemplateProbe

FIRST = {"role": "user", "content": "first"}
SECOND = {"role": "assistant", "content": "second"}
IN_ORDER = "{% for m in messages %}{{ m.content }}{% endfor %}"
REVERSED = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('no') }}"
NEEDS_TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + IN_ORDER


def test_texts_are_shown_in_order_or_not_at_all() -> None:
    chat = [FIRST, SECOND]
    assert TemplateProbe(IN_ORDER, ()).shows(chat)
    assert not TemplateProbe(REVERSED, ()).shows(chat)
    assert not TemplateProbe("", ()).shows(chat)
    assert not TemplateProbe(REFUSES, ()).shows(chat)


def test_a_refusal_is_no_text() -> None:
    assert TemplateProbe(REFUSES, ()).text([FIRST]) is None
    assert TemplateProbe(IN_ORDER, ()).text([FIRST]) == "first"


def test_a_template_may_need_tools() -> None:
    assert TemplateProbe(NEEDS_TOOLS, ()).text([FIRST]) is None
    assert TemplateProbe(NEEDS_TOOLS, (), tools=True).text([FIRST]) == "ffirst"


def test_variables_and_tokens_are_given() -> None:
    probe = TemplateProbe("{{ bos_token }}{{ effort }}", (("bos_token", "<s>"),))
    assert probe.text([FIRST], {"effort": "high"}) == "<s>high"
