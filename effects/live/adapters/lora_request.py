"""vLLM's `LoRARequest`: an adapter, as programs name it."""

from pathlib import Path
from typing import Any

from attrs import frozen

from minfer.effects.live.errors import RequestError


@frozen
class LoRARequest:
    """An adapter for requests: `LoRARequest("sql", 1, "path/to/adapter")`.

    `lora_path` is a folder with an adapter_config.json and an adapter_model.safetensors,
    in PEFT's form, or its name on the hub (org/name or org/name@revision). Requests with
    the same name use the same adapter; `load_inplace` reads its files anew. The number is
    vLLM's, and must be at least 1; minfer knows adapters by their content. Raises
    RequestError.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | Path = ""
    base_model_name: str | None = None
    tensorizer_config_dict: Any = None
    load_inplace: bool = False

    def __attrs_post_init__(self) -> None:
        name, number = self.lora_name, self.lora_int_id
        if not isinstance(name, str) or not name or not name.isprintable():
            reason = f"lora_name must be a text that is not empty, not {name!r:.80}"
            raise RequestError(reason, param="lora_request")
        if type(number) is not int or number < 1:
            reason = f"lora_int_id must be a whole number from 1, not {number!r:.80}"
            raise RequestError(reason, param="lora_request")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            reason = "lora_path must be the folder of the adapter"
            raise RequestError(reason, param="lora_request")
        if self.tensorizer_config_dict is not None:
            reason = "tensorizer_config_dict is not supported; give a folder (lora_path)"
            raise RequestError(reason, param="lora_request")

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The number."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The adapter's folder, or its name on the hub."""
        return str(self.lora_path)
