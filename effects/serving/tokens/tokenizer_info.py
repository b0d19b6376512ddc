"""GET /tokenizer_info: the tokenizer's configuration; vLLM's, and by an option only, as
it has the chat template.
"""

from pathlib import Path
from typing import Any, Final

from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.models.json_files import read_optional
from minfer.effects.text.tokenizer import Tokenizer

OPTION: Final = "--enable-tokenizer-info-endpoint"


def tokenizer_info(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json in a model's folder has, the special tokens as texts,
    and the chat template; of a GGUF file, the latter two.
    """
    path = folder / "tokenizer_config.json"
    config = {} if is_gguf(folder) else read_optional(path)
    return {
        **config,
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
