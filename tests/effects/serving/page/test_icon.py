"""The page has the icon, and who asks for it elsewhere finds it, with no key."""

from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from minfer.effects.serving.page.files import INDEX, PAGE_FOLDER
from minfer.effects.serving.page.icon import ICON, KIND, PATH
from tests.effects.served import serving
from tests.effects.serving.page.visits import DRY

_AS_IT_IS = " '=/:"  # of what stands in a URL otherwise


def test_it_is_a_picture() -> None:
    root = ElementTree.fromstring(ICON)  # noqa: S314  # it is ours
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_names_it() -> None:
    url = f"data:{KIND},{quote(ICON, safe=_AS_IT_IS)}"
    assert url in (PAGE_FOLDER / INDEX).read_text().replace("&#x27;", "'")


@pytest.mark.long
def test_it_is_served_without_a_key() -> None:
    with serving(service={"api_key": "secret"}, **DRY) as served:
        response = served.get(PATH)
    assert (response.status_code, response.text) == (200, ICON)
    assert response.headers["content-type"] == KIND
