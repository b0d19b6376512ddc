"""What is cached of one tenant's prompts is found by that tenant alone."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from minfer.effects.execution.tiers.folder_epochs import FolderEpochs
from minfer.effects.serving.access.api_keys import ApiKey, ApiKeys, digest, read_keys
from minfer.effects.serving.access.server_bounds import ServerBounds
from minfer.effects.serving.access.tenants import Tenants
from tests.effects.served import Serving, serving
from tests.effects.serving.raw_requests import SLOW
from tests.effects.serving.test_server import process


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name, digest(name.encode()), **fields)


ANN, ANNS, BOB = key("ann"), key("ann-2", tenant="ann"), key("bob")
ADMIN = key("root", admin=True)
KEYS = ApiKeys((ANN, ANNS, BOB, ADMIN))
NAMES = ("ann", "bob")


def test_a_salt_follows_from_the_tenant_and_the_secret() -> None:
    new = ApiKey("another", digest(b"another"), tenant="ann")
    first, second = Tenants(KEYS, "s"), Tenants(ApiKeys((new, BOB)), "s")
    assert first.salt(ANN, b"") == first.salt(ANNS, b"") == second.salt(ANN, b"")
    owners, salts_sent = (ANN, BOB, ADMIN), (b"", b"ann", b"\0", first.salt(ANN, b""))
    salts = [
        first.salt(*owner_and_salt)
        for owner_and_salt in itertools.product(owners, salts_sent)
    ]
    salts += [Tenants(KEYS, "t").salt(ANN, b""), Tenants(KEYS).salt(ANN, b"")]
    salts += [Tenants(KEYS).salt(ANN, b""), *salts_sent[:3]]
    assert len(set(salts)) == len(salts)


def test_a_reset_changes_one_tenants_salts_for_good() -> None:
    tenants = Tenants(KEYS, "s")
    before = {tenants.salt(ANN, b"")}
    bobs = tenants.salt(BOB, b"")
    for _ in range(100):
        tenants.reset(ANNS)
        before.add(tenants.salt(ANN, b""))
        assert tenants.salt(ANNS, b"") == tenants.salt(ANN, b"")
    assert len(before) == 101
    assert tenants.salt(BOB, b"") == bobs


def test_resets_are_kept_with_blocks_on_disk(tmp_path: Path) -> None:
    """By all servers of a folder, and after their ends."""
    first, second = (
        Tenants(KEYS, "s", FolderEpochs.open(tmp_path / "kv")) for _ in range(2)
    )
    before, bobs = first.salt(ANN, b""), first.salt(BOB, b"")
    assert second.salt(ANN, b"") == before
    first.reset(ANNS)
    later = Tenants(KEYS, "s", FolderEpochs.open(tmp_path / "kv"))
    [now] = {tenants.salt(ANN, b"") for tenants in (first, second, later)}
    assert now != before
    assert {tenants.salt(BOB, b"") for tenants in (first, second, later)} == {bobs}
    assert "after a restart" not in first.describe()
    assert "after a restart" in Tenants(KEYS, "", FolderEpochs(tmp_path)).describe()


def test_where_nothing_is_separate_salts_are_the_clients_own() -> None:
    for tenants, key in (
        (Tenants(ApiKeys()), None),
        (Tenants(ApiKeys(KEYS.known, share_all=True)), ANN),
    ):
        assert not tenants.separate
        assert [tenants.salt(key, sent) for sent in (b"", b"x")] == [b"", b"x"]


def test_all_keys_of_the_command_line_are_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entries = [{"name": "key", "key": "z"}, {"name": "x", "key": "x", "tenant": "key"}]
    path.write_text(json.dumps(entries))
    first, second, third, fourth = read_keys(["a", "b"], path).known
    tenants = Tenants(ApiKeys((first, second, third, fourth)), "s")
    salts = [tenants.salt(key, b"") for key in (first, second, third, fourth)]
    assert salts[0] == salts[1] != salts[2] == salts[3]


def test_start_up_says_which_holds() -> None:
    assert "shared by all: there are no API keys" in Tenants(ApiKeys()).describe()
    assert "each tenant (3), with a random secret" in Tenants(KEYS).describe()
    assert "the secret of --cache-secret" in Tenants(KEYS, "s").describe()
    shared = Tenants(ApiKeys(KEYS.known, share_all=True)).describe()
    assert "shared by all tenants" in shared


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(
        service={"bounds": ServerBounds(keys=KEYS)}, **SLOW | {"step": 0}
    ) as server:
        yield server


def ask(served: Serving, name: str, path: str, **body: Any) -> Any:
    headers = {"x-api-key": name}
    url = f"{served.url}/{path}"
    answer = served.http.post(url, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def over_socket(served: Serving, name: str, body: dict[str, Any]) -> Any:
    url = f"ws://127.0.0.1:{served.port}/v1/stream"
    with connect(url, additional_headers={"x-api-key": name}) as link:
        link.send(json.dumps({"id": "a", "endpoint": "completions", "body": body}))
        return json.loads(link.recv(10))["event"]


TEXT = "a text that only one tenant has sent " * 20
MESSAGES = [{"role": "user", "content": TEXT}]
REQUESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("v1/completions", {"prompt": TEXT, "max_tokens": 1}),
    "salted": ("v1/completions", {"prompt": TEXT, "max_tokens": 1, "cache_salt": "s"}),
    "several": ("v1/completions", {"prompt": [TEXT, TEXT], "max_tokens": 1, "n": 2}),
    "beams": (
        "v1/completions",
        {"prompt": TEXT, "max_tokens": 2, "use_beam_search": True, "n": 2},
    ),
    "chat": ("v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    "responses": ("v1/responses", {"input": TEXT, "max_output_tokens": 1}),
    "messages": ("v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    "socket": ("", {"prompt": TEXT, "max_tokens": 1}),
}
COUNTS = ("cached_tokens", "cache_read_input_tokens")


def cached(answer: Any) -> int:
    """The cached tokens of an answer, wherever it has them."""
    if isinstance(answer, dict):
        count = sum(answer.get(name) or 0 for name in COUNTS)
        return count + sum(map(cached, answer.values()))
    return sum(map(cached, answer)) if isinstance(answer, list) else 0


@pytest.mark.long
@pytest.mark.parametrize("kind", REQUESTED)
def test_no_protocol_tells_a_tenant_what_another_has_sent(
    served: Serving, kind: str
) -> None:
    path, body = REQUESTED[kind]
    body = {"model": "tiny", **body}

    def count(name: str) -> int:
        if not path:
            return cached(over_socket(served, name, body))
        return cached(ask(served, name, path, **body))

    def reset(name: str) -> None:
        assert ask(served, name, "reset_prefix_cache") == {"success": True}

    reset("root")
    solo = count("ann")  # of prompts of one request, each may find the one before it
    repeated = count("ann")
    assert repeated > solo
    assert count("bob") == solo
    assert count("ann-2") == repeated
    reset("bob")
    assert count("ann") == repeated
    reset("ann-2")
    assert count("ann") == solo
    assert count("bob") == solo
    assert count("bob") == repeated
    reset("root")
    assert [count(name) for name in ("ann", "bob")] == [solo, solo]


@pytest.mark.long
def test_a_shared_cache_is_reset_only_by_an_admin() -> None:
    keys = ApiKeys(KEYS.known, share_all=True)
    with serving(
        service={"bounds": ServerBounds(keys=keys)}, **SLOW | {"step": 0}
    ) as served:
        path, body = REQUESTED["completions"]
        assert [cached(ask(served, name, path, **body)) > 0 for name in ("ann", "bob")]
        url = f"{served.url}/reset_prefix_cache"
        refused = served.http.post(url, headers={"x-api-key": "bob"})
        assert refused.status_code == 403
        assert "admin = true" in refused.json()["error"]["message"]
        assert cached(ask(served, "ann", path, **body)) > 0
        ask(served, "root", "reset_prefix_cache")
        assert cached(ask(served, "ann", path, **body)) == 0


@pytest.mark.long
def test_a_reset_at_one_front_holds_at_the_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "ann"\nkey = "ann"\n')
    options = ("--dry-run", "--api-processes=2", f"--api-keys-file={path}")
    body = {"prompt": TEXT, "max_tokens": 1}
    head = {"x-api-key": "ann", "connection": "close"}  # each time at any API server
    with process(*options) as (_, url):

        def count() -> int:
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=head)
            return cached(answer.json())

        counts = [count() for _ in range(8)]
        assert counts[0] == 0 < counts[1]
        assert counts[1:] == [counts[1]] * 7
        for _ in range(4):
            answer = httpx.post(f"{url}/reset_prefix_cache", headers=head)
            assert answer.json() == {"success": True}
            assert [count() for _ in range(4)] == counts[:4]


@pytest.mark.long
def test_tenants_find_their_blocks_on_disk_after_a_restart(tmp_path: Path) -> None:
    """But what they had before they reset their caches."""
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[[keys]]\nname = "{n}"\nkey = "{n}"\n' for n in NAMES))
    options = (
        "--device=cpu",
        "--block-size=8",
        "--max-num-seqs=4",
        f"--api-keys-file={path}",
        f"--kv-disk={tmp_path / 'kv'}",
        "--kv-disk-size=1G",
        "--kv-disk-choice=load",
    )
    body = {"prompt": TEXT, "max_tokens": 1}

    def count(url: str, name: str, path: str = "v1/completions") -> int:
        head = {"x-api-key": name}
        answer = httpx.post(f"{url}/{path}", json=body, headers=head, timeout=60)
        assert answer.status_code == 200, answer.text
        return cached(answer.json())

    secret = {"MINFER_CACHE_SECRET": "of this deployment"}
    with process(*options, **secret) as (server, url):
        assert [count(url, name) for name in NAMES] == [0, 0]
        hit = count(url, "ann")
        count(url, "bob", "reset_prefix_cache")
        server.terminate()
        server.wait(30)
    with process(*options, **secret) as (_, url):
        assert [count(url, name) for name in NAMES] == [hit, 0]
