"""The descriptions of all settings, for `help(LLM)` and the documentation.

A setting that is an option of all commands has its description in its metadata
(`minfer.effects.setup.option_values.option`). `OTHERS` describes those that are options
of some commands only, or of none.
"""

import re
from collections.abc import Iterator, Mapping
from textwrap import TextWrapper
from typing import Final

from attrs import fields, frozen

from minfer.effects.setup.engine_args import EngineArgs

OTHERS: Final[Mapping[str, str]] = {
    "chat_template": "the chat template, in place of the checkpoint's: a file in Jinja, "
    "or the template's text (default: the checkpoint's)",
    "default_chat_template_kwargs": "variables of the chat template for every "
    "conversation; those of a call come before them (default: none)",
    "tool_call_parser": "how the model writes tool calls: auto, what its chat template "
    "shows; none, they stay text; or a format's name (default: auto)",
    "reasoning_parser": "how the model writes reasoning, as tool_call_parser (default: "
    "auto)",
    "skip_tokenizer_init": "load no tokenizer: prompts and outputs are token ids",
    "max_waiting": "most samples in the waiting queue; a request beyond is refused "
    f"(default: {2**20})",
    "lora_modules": "adapters to start with, each as NAME=PATH or as a JSON object of "
    "vLLM's (default: none; lora_request of a call names others)",
    "executor": "torch; dry, which makes up its output at once; or oracle, which also "
    "checks the KV blocks that each step reads (default: torch)",
}
# Settings that minfer's own server and tests use.
INTERNAL: Final = frozenset(
    {"kv_disk_secret", "kv_peers", "lora_registry", "streaming", "check_steps"}
)
_OPTION: Final = re.compile(r"--([a-z][a-z-]+[a-z])")
_WIDTH: Final = 78
SUMMARY: Final = """Load the model, and start an engine.

Raises CheckpointError for a checkpoint that cannot be used, ConfigError for a setting
that is out of range, and NotEnoughMemoryError. All settings but `model` are keywords.
"""


@frozen
class SettingHelp:
    """A setting of an engine, as users read of it."""

    name: str
    text: str


def settings_help() -> Iterator[SettingHelp]:
    """Yields the description of each setting that users may give."""
    for setting in fields(EngineArgs):
        if setting.name not in INTERNAL:
            text = setting.metadata.get("help") or OTHERS.get(setting.name, "")
            yield SettingHelp(setting.name, _in_python(text))


def _in_python(text: str) -> str:
    """Returns the text with `max_model_len` for `--max-model-len`."""
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), text)


def settings_docstring() -> str:
    """Returns the docstring of a class's constructor with these settings."""
    wrapper = TextWrapper(_WIDTH, initial_indent="    ", subsequent_indent="    ")
    lines = [SUMMARY, ""]
    for setting in settings_help():
        lines.append(setting.name)
        lines += wrapper.wrap(setting.text)
    return "\n".join(lines)
