"""All tables, one for each client."""

from typing import Final

from tests.effects.serving.sdk import (
    anthropic_cases,
    langchain_cases,
    litellm_cases,
    openai_answers,
    openai_failures,
)

assert openai_failures.case is openai_answers.TABLE  # both files write into one
TABLES: Final = (
    openai_answers.TABLE,
    anthropic_cases.TABLE,
    langchain_cases.TABLE,
    litellm_cases.TABLE,
)
