"""The documentation's site: all pages are in it, and all links lead somewhere."""

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from minfer.effects.cli import serve
from minfer.effects.cli.commands import CommandLineParser
from minfer.effects.serving.observability.metric_help import HELP

ROOT: Final = Path(__file__).resolve().parents[2]
LINK: Final = re.compile(r"\]\(([^)\s#]+)")
FENCE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.long


@pytest.fixture
def build_site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported."""
    monkeypatch.syspath_prepend(str(ROOT / ".github" / "site"))
    for name in ("pages", "build_site"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("build_site")


def test_the_site_has_all_pages_and_their_links_lead_somewhere(
    build_site: Any, tmp_path: Path
) -> None:
    assert build_site.build(tmp_path, docs_only=True) == 0
    docs = tmp_path / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert {str(path).removeprefix(".github/") for path in build_site.readmes()} < written
    settings = (tmp_path / "zensical.toml").read_text("utf-8")
    assert [page for page in written if f'"{page}"' not in settings] == []
    for path in docs.rglob("*.md"):
        for link in LINK.findall(FENCE.sub("", path.read_text("utf-8"))):
            assert link.startswith("http") or (path.parent / link).exists(), (path, link)


def test_generated_tables_are_complete(build_site: Any) -> None:
    parser = CommandLineParser()
    serve.add_options(parser)
    options = build_site.pages.options_page()
    names = re.findall(r"--[a-z][\w-]+", parser.format_help())
    assert len(names) > 60
    assert [name for name in names if name not in options] == []
    metrics = build_site.pages.metrics_page()
    assert [name for name in HELP if f"`minfer_{name}`" not in metrics] == []
    assert "`POST /v1/chat/completions`" in build_site.pages.endpoints_page()
    assert "### LLM.generate" in build_site.pages.python_page()


def test_a_section_that_is_not_there_is_an_error(build_site: Any) -> None:
    with pytest.raises(ValueError, match="has no section 'Nothing'"):
        build_site.section("# A\n\n## Other\n", "Nothing", "a.md", "b.md")


@pytest.mark.skipif(
    find_spec("zensical") is None,
    reason="the extra `docs` is not installed: pip install '.[docs]' in a clone",
)
def test_the_site_builds_without_a_warning(build_site: Any, tmp_path: Path) -> None:
    assert build_site.build(tmp_path) == 0
    assert (tmp_path / "site" / "reference" / "options" / "index.html").is_file()
