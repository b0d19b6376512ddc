"""`help(LLM)` explains all settings, in Python's names."""

import pydoc

import pytest
from attrs import fields

from minfer import LLM, AsyncLLM
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.option_descriptions import INTERNAL, OTHERS, settings_help


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_help_explains_each_setting(kind: type) -> None:
    shown = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for setting in settings_help():
        assert f"{setting.name} {setting.text}" in shown


def test_every_setting_has_a_description_without_options() -> None:
    described = {setting.name: setting.text for setting in settings_help()}
    names = {setting.name for setting in fields(EngineArgs)}
    assert described.keys() == names - INTERNAL
    assert OTHERS.keys() | INTERNAL <= names
    assert [name for name, text in described.items() if not text or "--" in text] == []
