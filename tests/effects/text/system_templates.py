"""Short chat templates that treat system messages in the ways of public ones, and public
ones of a folder, if the environment names one.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# The folder has *.jinja files. Packages carry such folders: the source distribution of
# llama-cpp-python has vendor/llama.cpp/models/templates.
FOLDER: Final = "MINFER_CHAT_TEMPLATES"
_TURNS: Final = (
    "{% for m in turns %}{% if m.role == 'user' %}[user]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }}"
    "{% elif m.role == 'tool' %}[tool]{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_ALTERNATE: Final = (
    "{% set ns = namespace(count=0) %}{% for m in turns %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.count % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endif %}{% endfor %}"
)
SHORT: Final[Mapping[str, str]] = {
    # ChatML and others
    "shows all": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    # gpt-oss, MiniMax, Nemotron v2, SmolLM3, Reka
    "keeps the first": (
        "{% set turns = messages %}{% if messages[0].role == 'system' %}"
        "[system]{{ messages[0].content }}{% set turns = messages[1:] %}{% endif %}"
        + _TURNS
    ),
    # DeepSeek R1
    "keeps the last": (
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}"
        "{% endfor %}{{ ns.system }}{% set turns = messages %}" + _TURNS
    ),
    # DeepSeek V3.1
    "moves all to the front": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
        "{% endfor %}{% set turns = messages %}" + _TURNS
    ),
    # Qwen3.5
    "refuses a second": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ),
    # Mistral
    "wants turns to alternate": (
        "{% set turns = messages %}{% if messages[0].role == 'system' %}"
        "[system]{{ messages[0].content }}{% set turns = messages[1:] %}{% endif %}"
        "{% for m in turns %}{% if m.role == 'system' %}"
        "{{ raise_exception('only user and assistant roles are supported') }}"
        "{% endif %}{% endfor %}" + _ALTERNATE + _TURNS
    ),
    # Gemma 2
    "has no system message": (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% set turns = messages %}" + _ALTERNATE + _TURNS
    ),
    "drops system messages": "{% set turns = messages %}" + _TURNS,
}


def public_templates() -> Mapping[str, str]:
    """The templates of the folder that the environment names, by name."""
    folder = os.environ.get(FOLDER)
    paths = sorted(Path(folder).glob("*.jinja")) if folder else []
    return {path.stem: path.read_text() for path in paths}
