"""All tables, one for each client."""

from typing import Final

from tests.effects.serving.sdk import (
    anthropic_cases,
    langchain_cases,
    litellm_cases,
    openai_answers,
    openai_failures,
    openai_tools,
)

assert openai_failures.case is openai_answers.TABLE  # three files write into one
assert openai_tools.case is openai_answers.TABLE
TABLES: Final = (
    openai_answers.TABLE,
    anthropic_cases.TABLE,
    langchain_cases.TABLE,
    litellm_cases.TABLE,
)
