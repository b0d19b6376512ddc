"""Adapters as clients of a server name them, load them, and do not see them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.adapters.sources import AdapterSources
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, digest
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.setup.folders import bundled_folder
from minfer.records.messages import DropAdapter, LoadAdapter
from tests.effects.served import Serving, serving
from tests.effects.small_adapters import write_adapter

ADMIN = ApiKey("root", digest(b"root"), admin=True)
ANN = ApiKey("ann", digest(b"ann"), adapters=("ann/*", "sql"))
BOB = ApiKey("bob", digest(b"bob"))
KEYS = ApiKeys((ADMIN, ANN, BOB))
LORA: dict[str, Any] = {"executor": "dry", "enable_lora": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters below a folder that is allowed, and one that is not."""
    root = tmp_path_factory.mktemp("adapters").resolve()
    model = bundled_folder()
    for seed, name in enumerate(("sql", "ann/one", "bob", "slow", "gone", "other")):
        write_adapter(root / "allowed" / name, model, seed=seed)
    write_adapter(root / "outside", model, seed=9)
    (root / "allowed" / "link").symlink_to(root / "outside")
    large = write_adapter(root / "allowed" / "large", model, rank=64)
    (root / "allowed" / "pickle").mkdir()
    (root / "allowed" / "pickle" / "adapter_model.bin").write_bytes(b"x")
    config = (large / "adapter_config.json").read_text()
    (root / "allowed" / "pickle" / "adapter_config.json").write_text(config)
    broken = write_adapter(root / "allowed" / "broken", model)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes((2**62).to_bytes(8, "little") + weights.read_bytes()[8:])
    return root


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Serving]:
    sources = AdapterSources(folders=(folders / "allowed",), runtime_updates=True)
    bounds = ServerBounds(keys=KEYS, adapter_sources=sources)
    modules = [f"start={folders / 'allowed' / 'sql'}"]
    service = {"bounds": bounds}
    with serving(names=("base",), service=service, lora_modules=modules, **LORA) as made:
        yield made


def post(server: Serving, path: str, key: str = "root", **body: Any) -> httpx.Response:
    head = {"Authorization": f"Bearer {key}"}
    return server.http.post(f"{server.url}{path}", json=body, headers=head)


def load(server: Serving, name: Any, path: Any, key: str = "root", **body: Any) -> Any:
    fields = {"lora_name": name, "lora_path": path, **body}
    return post(server, "/v1/load_lora_adapter", key, **fields)


def unload(server: Serving, name: str, key: str = "root") -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", key, lora_name=name)


def complete(server: Serving, model: str, key: str = "root") -> httpx.Response:
    body = {"model": model, "prompt": "def f(", "max_tokens": 2}
    return post(server, "/v1/completions", key, **body)


def listed(server: Serving, key: str, **headers: str) -> list[str]:
    head = {"Authorization": f"Bearer {key}", **headers}
    answer = server.http.get(f"{server.url}/v1/models", headers=head).json()
    return [card["id"] for card in answer["data"]]


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_a_name_selects_an_adapter_in_every_protocol(server: Serving) -> None:
    talk = [{"role": "user", "content": "hi"}]
    server.turns.clear()
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": talk, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
    )
    for path, body in bodies:
        for model in ("start", "base"):
            answer = post(server, path, model=model, **body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
    submitted = [
        event.request.adapter
        for events, _ in server.turns
        for event in events
        if hasattr(event, "request")
    ]
    assert server.llm.adapters is not None
    entry = server.llm.adapters.find("start")
    assert entry is not None
    assert submitted == [entry.digest, ""] * 5
    count = post(server, "/v1/messages/count_tokens", model="start", messages=talk)
    assert count.json()["input_tokens"] > 0
    missing = post(server, "/tokenize", model="nothing", prompt="a")
    assert error(missing)[0] == 404


def test_large_bodies_name_adapters_too(server: Serving) -> None:
    body: dict[str, Any] = {
        "prompt": [[1]] * 2,
        "max_tokens": 1,
        "metadata": {"a": "a" * 5000},
    }
    answer = post(server, "/v1/completions", model="start", **body)
    assert answer.status_code == 200, answer.text
    unknown = post(server, "/v1/completions", model="nothing", **body)
    assert unknown.status_code == 404


def test_lists_and_cards_say_where_an_adapter_is_from(server: Serving) -> None:
    head = {"Authorization": "Bearer root"}
    cards = server.http.get(f"{server.url}/v1/models", headers=head).json()["data"]
    base, card = cards[0], next(card for card in cards if card["id"] == "start")
    assert (base["root"], base["parent"]) == ("base", None)
    assert card["parent"] == "base"
    assert card["root"].endswith("/allowed/sql")
    assert card["max_model_len"] == base["max_model_len"]
    one = server.http.get(f"{server.url}/v1/models/start", headers=head)
    assert one.json() == card
    anthropic = {**head, "anthropic-version": "2023-06-01"}
    one = server.http.get(f"{server.url}/v1/models/start", headers=anthropic)
    assert one.json()["id"] == "start"
    assert one.json()["type"] == "model"
    assert "start" in listed(server, "root", **{"anthropic-version": "2023-06-01"})


def test_a_name_is_loaded_on_first_use(server: Serving, folders: Path) -> None:
    assert "bob" not in listed(server, "root")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(server, "bob", "bob"), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert "bob" in listed(server, "root")
    for name in ("link", "../outside", "allowed/../../outside", "/etc", "nothing", ".."):
        status, message = error(complete(server, name))
        assert status in (400, 404), message
        assert "not below" in message or "there is no model" in message
        assert str(folders) not in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("large", "has rank 64, and at most 16 is allowed"),
        ("pickle", "is a pickle"),
        ("broken", "adapter_model.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_named_and_stops_nothing(
    server: Serving, folders: Path, name: str, words: str
) -> None:
    for _ in range(2):  # the second time from memory
        status, message = error(complete(server, name, "bob"))
        assert status == 400
        assert words in message
        assert str(folders) not in message
    assert complete(server, "base", "bob").status_code == 200


def test_a_key_uses_its_adapters_alone(server: Serving) -> None:
    assert complete(server, "ann/one", "ann").status_code == 200
    assert complete(server, "sql", "ann").status_code == 200
    assert {"ann/one", "sql"} < set(listed(server, "bob"))
    assert set(listed(server, "ann")) == {"base", "sql", "ann/one"}
    absent = error(complete(server, "nothing-at-all", "ann"))
    for name in ("start", "slow"):  # one that is loaded, and one that is not
        status, message = error(complete(server, name, "ann"))
        assert (status, message.replace(name, "nothing-at-all")) == absent
        head = {"Authorization": "Bearer ann"}
        card = server.http.get(f"{server.url}/v1/models/{name}", headers=head)
        assert card.status_code == 404
    assert "slow" not in listed(server, "root")  # nothing was loaded for that


def test_administrators_load_and_unload(server: Serving, folders: Path) -> None:
    assert load(server, "mine", "gone").status_code == 200
    status, message = error(load(server, "mine", "sql"))
    assert status == 400
    assert "there is an adapter 'mine' already (from gone)" in message
    before = server.llm.adapters.find("mine") if server.llm.adapters else None
    assert complete(server, "mine").status_code == 200
    answer = load(server, "mine", str(folders / "allowed" / "slow"), load_inplace=True)
    assert answer.json() == {
        "message": "Success: LoRA adapter 'mine' added successfully."
    }
    after = server.llm.adapters.find("mine") if server.llm.adapters else None
    assert before
    assert after
    assert before.digest != after.digest
    server.turns.clear()
    assert unload(server, "mine").status_code == 200
    server.until(
        lambda: any(
            event == DropAdapter(after.digest)
            for events, _ in server.turns
            for event in events
        )
    )
    assert error(complete(server, "mine"))[0] == 404
    assert error(unload(server, "mine"))[0] == 404


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("base", "gone", "the model itself has the name 'base'"),
        ("x", "/etc", "lora_path '/etc': adapters are loaded from below"),
        ("x", "../outside", "from below the folders"),
        ("x", "link", "from below the folders"),
        ("x", ".", "from below the folders"),
        ("x", "", "from below the folders"),
        ("x", "a\0b", "from below the folders"),
        ("x", "org/name", "there is no such folder"),
        ("x", "x" * 5000, "its files cannot be read: File name too long"),
        ("", "gone", "an adapter cannot have the name ''"),
        ("a b", "gone", "an adapter cannot have the name 'a b'"),
        ("../x", "gone", "cannot have the name '../x'"),
        ("a/../b", "gone", "cannot have the name"),
        ("é", "gone", "cannot have the name"),
        ("x\n", "gone", "cannot have the name"),
        ("x" * 201, "gone", "cannot have the name"),
        (7, "gone", "the body is not valid"),
    ],
)
def test_a_wrong_load_is_named(server: Serving, name: Any, path: str, words: str) -> None:
    status, message = error(load(server, name, path))
    assert status == 400, message
    assert words in message


def test_clients_do_not_get_the_errors_of_administrators(server: Serving) -> None:
    status, message = error(load(server, "other", "broken"))
    assert status == 400
    assert message.startswith("adapter 'broken': adapter_model.safetensors says")
    assert complete(server, "other", "ann").status_code == 404  # may not use it
    assert complete(server, "other", "bob").status_code == 200  # from its own folder


def test_only_administrators_update(server: Serving) -> None:
    for key in ("ann", "bob"):
        assert error(load(server, "x", "gone", key))[0] == 403
        assert error(unload(server, "start", key))[0] == 403
    assert load(server, "x", "gone", "wrong").status_code == 401
    head = {"Authorization": "Bearer root", "Origin": "https://elsewhere.example"}
    body = {"lora_name": "x", "lora_path": "gone"}
    url = f"{server.url}/v1/load_lora_adapter"
    assert server.http.post(url, json=body, headers=head).status_code == 403
    large = server.http.post(
        url, content=b" " * 2**17, headers={**head, "Content-Type": "application/json"}
    )
    assert large.status_code in (403, 413)


def test_an_unload_while_a_request_runs(folders: Path) -> None:
    """It ends as it would have; new ones are refused."""
    sources = AdapterSources(folders=(folders / "allowed",), runtime_updates=True)
    bounds = ServerBounds(keys=KEYS, adapter_sources=sources)
    with (
        serving(names=("base",), service={"bounds": bounds}, step=0.001, **LORA) as made,
        ThreadPoolExecutor(1) as pool,
    ):
        body: dict[str, Any] = {"model": "sql", "prompt": "a", "max_tokens": 6}
        body["ignore_eos"] = True
        with made.after(3):
            running = pool.submit(post, made, "/v1/completions", **body)
            made.until(lambda: bool(made.llm.worker.driver.state.running.seqs))
            assert unload(made, "sql").status_code == 200
            assert load(made, "sql", "gone").status_code == 200  # another one now
        assert running.result().json()["usage"]["completion_tokens"] == 6
        server_names = [entry.origin for entry in made.service.adapters.visible(None)]  # type: ignore[union-attr]
        assert server_names == ["gone"]
        loads = [
            command
            for _, transition in made.turns
            for command in transition.commands
            if isinstance(command, LoadAdapter)
        ]
        assert len(loads) == 1
        assert complete(made, "sql").status_code == 200


def test_a_server_without_the_option_loads_nothing(folders: Path) -> None:
    sources = AdapterSources(folders=(folders / "allowed",))
    for enabled in (False, True):
        bounds = ServerBounds(keys=KEYS, adapter_sources=sources)
        service = {"bounds": bounds}
        with serving(service=service, executor="dry", enable_lora=enabled) as made:
            status, message = error(load(made, "x", "sql"))
            assert status == 404
            assert "--allow-runtime-lora-updating" in message
            expected = 200 if enabled else 404
            assert complete(made, "sql").status_code == expected


def test_bodies_of_updates_are_strict(server: Serving) -> None:
    url = f"{server.url}/v1/load_lora_adapter"
    head = {"Authorization": "Bearer root", "Content-Type": "application/json"}
    for data in (b"", b"[]", b"{", b'"' + b"[" * 60_000, b'{"lora_name": "x"}', b"\xff"):
        answer = server.http.post(url, content=data, headers=head)
        assert answer.status_code == 400, answer.text
    extra = json.dumps({"lora_name": "x", "lora_path": "y", "z": 1})
    answer = server.http.post(url, content=extra, headers=head)
    assert "unknown field `z`" in answer.json()["error"]["message"]
    assert server.http.post(url, content=b" " * 2**17, headers=head).status_code == 413


def test_a_load_that_fails_in_the_engine_ends_its_requests(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = AdapterSources(folders=(folders / "allowed",))
    service = {"bounds": ServerBounds(adapter_sources=sources, vllm_metrics=True)}
    with serving(names=("base",), service=service, **LORA) as made:
        executor: Any = made.llm.worker.driver.executor

        def refuse(digest: bytes, folder: str) -> None:
            raise AdapterError(f"{folder}: {digest.hex()} is gone")

        monkeypatch.setattr(executor, "add_adapter", refuse)
        for stream in (False, True):
            answer = made.post("completions", model="sql", prompt="a", stream=stream)
            assert "the adapter of this request could not be loaded" in answer.text
            assert "adapter_failed" in answer.text
            assert "allowed" not in answer.text
        assert answer.status_code in (200, 500)
        assert made.post("completions", model="base", prompt="a").status_code == 200
        monkeypatch.undo()
        assert complete(made, "sql").status_code == 200  # it is tried again
        metrics = made.get("/metrics").text
        assert 'minfer_failed_adapter_loads_total{model_name="base"} 2.0' in metrics
        assert 'vllm:lora_requests_info{max_lora="8",running_lora_adapters=""' in metrics
        shown = made.get("/ready").json()["adapters"]
        assert shown == {"named": 1, "running": 0, "waiting": 0, "slots": 8}
        assert main(["status", made.url]) == 0


def test_status_shows_how_many_there_are(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", server.url]) == 0
    assert " named, 0 running, 0 waiting, 8 slots" in capsys.readouterr().out
