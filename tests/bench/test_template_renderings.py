"""The comparison of renderings finds what differs, and what both refuse."""

from pathlib import Path

import pytest

from bench.template_cases import CASES
from bench.template_renderings import Pair
from minfer.effects.text import template_probe
from minfer.effects.text.template_rendering import render_template

pytest.importorskip("transformers")
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.long
def test_outcomes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)

    def outcome(template: str, case: str) -> str:
        return str(pair.compare(template, CASES[case])["outcome"])

    assert outcome(TURNS, "several turns") == "equal"
    assert outcome("{{ raise_exception('no') }}", "plain") == "both refuse"
    first = "{{ messages[0].content }}"
    placed = pair.compare(first, CASES["late system message"])
    assert placed["outcome"] == "differs"
    assert "system_messages" in placed["reason"]
    refuses_two = "{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}" + first
    assert outcome(refuses_two, "system") == "transformers refuses"
    monkeypatch.setattr(
        template_probe,
        "render_template",
        lambda *arguments: render_template(*arguments) + "!",
    )
    wrong = pair.compare(TURNS, CASES["plain"])
    assert wrong["outcome"] == "differs"
    assert "reason" not in wrong
    assert any(
        line.startswith("+") and line.endswith("!") for line in wrong["difference"]
    )
