"""The files of the page: whole, the server's own, and asked for once."""

import re

import pytest

from minfer.effects.serving.page.files import FILES, INDEX, PAGE_PATHS
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import DRY

OWN = re.compile(r"""(?:from|import|href=|src=)\s*["']([^"'#]+)["']""")


def test_every_file_that_one_names_is_served() -> None:
    named = set()
    for file in FILES:
        folder = file.path.rpartition("/")[0]
        for name in OWN.findall(file.data.decode()):
            if not name.startswith("data:"):
                named.add(f"{folder}/{name.removeprefix('./')}")
    assert named | {"/"} == set(PAGE_PATHS), INDEX


def test_nothing_is_named_that_is_elsewhere() -> None:
    allowed = ("http://www.w3.org/2000/svg",)  # a name, which is not loaded
    for file in FILES:
        text = file.data.decode()
        for name in allowed:
            text = text.replace(name, "")
        assert not re.search(r"https?://[a-z0-9]", text), file.path
        assert "innerHTML" not in text, file.path


@pytest.mark.long
def test_files_are_served_with_their_policy_and_kept_by_their_tag(dry: Serving) -> None:
    for file in FILES:
        response = dry.get(file.path)
        assert (response.status_code, response.content) == (200, file.data)
        assert response.headers["content-type"] == file.kind
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        for tag in (file.tag, f"W/{file.tag}", f'"other", {file.tag}'):
            cached_response = dry.http.get(
                dry.url + file.path, headers={"if-none-match": tag}
            )
            assert (cached_response.status_code, cached_response.content) == (304, b"")
        full_response = dry.http.get(
            dry.url + file.path, headers={"if-none-match": '"other"'}
        )
        assert full_response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/files.py", "/page/script/no.js"]
)
def test_nothing_else_is_served(dry: Serving, path: str) -> None:
    assert dry.get(path).status_code == 404


@pytest.mark.long
def test_the_files_need_no_key_and_all_else_does() -> None:
    with serving(service={"api_key": "secret"}, **DRY) as served:
        assert {served.get(path).status_code for path in PAGE_PATHS} == {200}
        for path in ("/live", "/live?once=1", "/v1/models", "/page/secret"):
            assert served.get(path).status_code == 401
