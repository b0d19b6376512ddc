"""What a model writes becomes elements, and never markup."""

import json
import re

import pytest

from tests.effects.browser import Browser
from tests.effects.served import Serving
from tests.effects.serving.page.visits import seen, visit

pytestmark = seen


@pytest.fixture(scope="module")
def page(chromium: Browser, dry: Serving) -> Browser:
    visit(chromium, dry)
    chromium.value(
        "import('/page/script/markdown.js').then((all) => { window.md = all })"
    )
    return chromium


def shown(page: Browser, *texts: str) -> str:
    """The markup for a text that grew to be the last of these."""
    made = page.value(
        "(() => { const into = document.createElement('div');"
        f"for (const text of {json.dumps(texts)}) md.render(into, text);"
        "return into.innerHTML; })()"
    )
    return str(made)


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        (
            "**a b** ~~c~~ `d*e*`",
            "<p><strong>a b</strong> <s>c</s> <code>d*e*</code></p>",
        ),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("a * b * c, *args, **kwargs", "<p>a * b * c, *args, **kwargs</p>"),
        ("__init__ and snake_case_name", "<p>__init__ and snake_case_name</p>"),
        (r"\*not\*", "<p>*not*</p>"),
        ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("---", "<hr>"),
        ("#no heading, 1.5 no item", "<p>#no heading, 1.5 no item</p>"),
    ],
)
def test_blocks_and_marks(page: Browser, text: str, markup: str) -> None:
    assert shown(page, text) == markup


def test_code(page: Browser) -> None:
    made = shown(page, "```python x\nif a < b:\n    c\n```\nafter")
    assert "<span>python</span>" in made
    assert "<code>if a &lt; b:\n    c</code>" in made
    assert made.endswith("</figure><p>after</p>")
    assert "<code>still **open**\n</code>" in shown(page, "~~~\nstill **open**\n")
    for source in ("def f(x):\n    return *x", "import os\n# no heading", "    a = 1"):
        made = shown(page, source)
        assert made.count("<figure") == 1, source
        assert "<h3>" not in made
    assert "<figure" not in shown(page, "Classes, and define f(x)")


def test_tables(page: Browser) -> None:
    made = shown(page, "| a | b |\n|:-:|--:|\n| 1 \\| 2 | `3` |\nafter")
    assert '<th class="center">a</th><th class="right">b</th>' in made
    assert '<td class="center">1 | 2</td><td class="right"><code>3</code></td>' in made
    assert made.endswith("<p>after</p>")


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JAVASCRIPT:alert(1)) [b](data:text/html,x) [c](//evil)",
        "![a](javascript:alert(1))",
        "```<img src=x>\n<b>\n```",
        "| <i>a</i> |\n|---|\n| <b>b</b> |",
        "[<b>](https://example.com/<script>)",
        'https://example.com/"onclick="alert(1)',
    ],
)
def test_nothing_hostile_becomes_markup(page: Browser, hostile: str) -> None:
    made = page.value(
        "(() => { const into = document.createElement('div');"
        f"md.render(into, {json.dumps(hostile)});"
        "return [...into.querySelectorAll('*')].flatMap((one) => [one.localName,"
        "...[...one.attributes].map(({ name, value }) => `${name}=${value}`)]); })()"
    )
    allowed = {"p", "a", "code", "div", "table", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"figure", "figcaption", "span", "button", "svg", "use", "pre"}
    allowed |= {"target=_blank", "rel=noopener noreferrer"}
    ours = re.compile(r"(class|title|aria-\w+|type|tabindex|data-code)=|href=#icon-copy")
    links = re.compile(r"href=https://example\.com/")
    for part in made:
        assert part in allowed or ours.match(part) or links.match(part), part
    assert page.complaints == []


def test_links_and_pictures(page: Browser) -> None:
    made = shown(page, "[a](https://example.com/b_(c)) https://example.com/d.")
    assert 'href="https://example.com/b_(c)"' in made
    assert 'href="https://example.com/d"' in made
    assert made.count("noopener noreferrer") == 2
    assert "<img" not in shown(page, "![a](https://example.com/b.png)")


def test_text_that_grows_keeps_the_elements_before(page: Browser) -> None:
    whole = "# A\n\none *two*\n\n```py\na\nb\n```\n\n- x\n- y\n\nend"
    parts = [whole[:i] for i in range(1, len(whole) + 1)]
    assert shown(page, *parts) == shown(page, whole)
    kept = page.value(
        "(() => { const into = document.createElement('div');"
        "md.render(into, 'one\\n\\n```\\na'); const [first, code] = into.children;"
        "md.render(into, 'one\\n\\n```\\na\\nb');"
        "return [into.children[0] === first, into.children[1] === code]; })()"
    )
    assert kept == [True, True]


def test_long_text_is_quick(page: Browser) -> None:
    """Marks that nothing closes must not be looked for again and again."""
    for piece in ("**a ", "*a ", "`a ", "[a](", "~~a ", "a|b\n", "> ", "- "):
        took = page.value(
            f"(() => {{ const text = {json.dumps(piece)}.repeat(9000 / "
            f"{len(piece)}); const into = document.createElement('div');"
            "const from = performance.now(); md.render(into, text);"
            "return performance.now() - from; })()"
        )
        assert took < 1000, piece
