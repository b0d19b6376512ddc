"""The tokenizer's configuration, as vLLM has it, if the server's option asks for it."""

import json
from pathlib import Path

from minfer.effects.serving.access.server_bounds import ServerBounds
from tests.effects.served import Serving
from tests.effects.serving.scripted_model import agent_server


def test_it_is_what_the_files_say(tmp_path: Path) -> None:
    bounds = ServerBounds(tokenizer_info=True)
    with agent_server(tmp_path / "m", "a template", bounds=bounds) as server:
        info = server.get("/tokenizer_info").json()
    path = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    assert info["chat_template"] == "a template"
    assert config.items() <= info.items()


def test_without_the_option_there_is_none(bundled: Serving) -> None:
    response = bundled.get("/tokenizer_info")
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert "--enable-tokenizer-info-endpoint" in message
