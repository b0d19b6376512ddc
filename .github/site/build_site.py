"""Build the documentation's site from the READMEs, the docstrings and the parsers:

    pip install '.[docs]'
    python .github/site/build_site.py FOLDER

The folder gets `docs`, all pages in Markdown, `zensical.toml`, and `site`, the site
itself. A link that leads nowhere is an error. `--docs` stops before the site, which needs
no extra.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pages

from minfer.extras import how_to_install

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
FOLDERS: Final = ("minfer", "effects", "kernels", "bench", "tests")
LINK: Final = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE: Final = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
# Python-Markdown, which the generator uses, wants a blank line before a list, four spaces
# within an item, and no backslash before a bar in the code of a table.
LIST: Final = re.compile(r"^((?!- | |\|).+\n)(- )", re.MULTILINE)
ITEM_INDENT: Final = re.compile(r"^ {3}(?=\S)", re.MULTILINE)
INLINE_CODE: Final = re.compile(r"`[^`\n]+`")
SETUP: Final = "effects/setup/README.md"
WATCH: Final = "effects/serving/observability/README.md"
POLICIES: Final = "minfer/policies/README.md"

Nav = Sequence[tuple[str, "str | Nav"]]
# The module that prints what becomes of each of vLLM's options.
VLLM_MODULE: Final = "minfer.effects.cli.vllm_page"
VLLM_PAGE: Final = "reference/vllm_options.md"
VLLM_PAGES: Final = (("vLLM's options", VLLM_PAGE),)
# The pages that users look for, in their order; `_other_pages` are all the others.
MAIN: Final[Nav] = (
    ("Quickstart", "README.md"),
    (
        "Coming from",
        (
            ("vLLM", "guide/coming_from_vllm.md"),
            ("llama.cpp", "guide/coming_from_llama_cpp.md"),
            ("Ollama", "guide/coming_from_ollama.md"),
        ),
    ),
    (
        "Use it",
        (
            ("Python", "effects/live/README.md"),
            ("HTTP", "effects/serving/README.md"),
            ("Deployment", "effects/deploy/README.md"),
            ("Causes of waits", "guide/causes_of_waits.md"),
            ("Troubleshooting", "guide/troubleshooting.md"),
        ),
    ),
    (
        "Extend it",
        (
            ("How to add a family", "effects/models/families/README.md"),
            ("How to write a policy", "guide/how_to_write_a_policy.md"),
            ("Contributing", ".github/CONTRIBUTING.md"),
        ),
    ),
    (
        "Reference",
        (
            ("Options", "reference/options.md"),
            *VLLM_PAGES,
            ("Endpoints", "reference/endpoints.md"),
            ("Metrics", "reference/metrics.md"),
            ("Python API", "reference/python.md"),
        ),
    ),
)
# Pages that are a section of a README.
SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "guide/coming_from_vllm.md": (SETUP, "Coming from vLLM"),
    "guide/coming_from_llama_cpp.md": (SETUP, "Coming from llama.cpp"),
    "guide/coming_from_ollama.md": (SETUP, "Coming from Ollama"),
    "guide/causes_of_waits.md": (WATCH, "Why a request waits"),
    "guide/troubleshooting.md": (WATCH, "Troubleshooting"),
    "guide/how_to_write_a_policy.md": (POLICIES, "How to write a policy"),
}


def readmes() -> list[Path]:
    """Returns the pages of the repository, relative to its root."""
    found = [ROOT / "README.md", *(ROOT / ".github").glob("*.md")]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("README.md")
    return sorted(path.relative_to(ROOT) for path in found)


def write_docs(docs: Path) -> None:
    """Write all pages of the site, and the files that they link to."""
    texts = {str(path): (ROOT / path).read_text("utf-8") for path in readmes()}
    for page, (source, title) in SECTIONS.items():
        texts[page] = section(texts[source], title, source, page)
    texts["guide/causes_of_waits.md"] += (
        "\n## Reasons\n\nWhat a journal and `minfer explain` have of the engine's "
        f"decisions:\n\n{pages.reasons_table()}"
    )
    texts |= {
        "reference/options.md": pages.options_page(),
        "reference/endpoints.md": pages.endpoints_page(),
        "reference/metrics.md": pages.metrics_page(),
        "reference/python.md": pages.python_page(),
    }
    texts[VLLM_PAGE] = "\n".join(import_module(VLLM_MODULE).page_lines()) + "\n"
    for page, text in texts.items():
        target = docs / _published(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _for_python_markdown(_with_files(text, page, docs))
        target.write_text(text, "utf-8")

    shutil.copyfile(HERE / "site.css", docs / "site.css")


def _published(page: str) -> str:
    """The page's path in the site, which has no hidden folders."""
    return page.removeprefix(".github/")


def section(text: str, title: str, source: str, page: str) -> str:
    """Returns a section of a README as the text of a page of its own; raises ValueError
    if there is none of this title.
    """
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if match is None:
        raise ValueError(f"{source} has no section {title!r}")

    def moved(link: re.Match[str]) -> str:
        name, heading = link[1], link[2] or ""
        if name.startswith("http"):
            return link[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), name or "."))
        target = source if not name else target
        return f"]({os.path.relpath(target, os.path.dirname(page))}{heading})"

    return f"# {title}\n{_outside_code(LINK, moved, match[1])}"


def _for_python_markdown(text: str) -> str:
    """Returns the text as Python-Markdown reads it; GitHub reads both."""
    text = _outside_code(LIST, r"\1\n\2", text)
    text = _outside_code(ITEM_INDENT, "    ", text)
    return _outside_code(INLINE_CODE, lambda code: code[0].replace("\\|", "|"), text)


def _outside_code(
    pattern: re.Pattern[str], replace: str | Callable[[re.Match[str]], str], text: str
) -> str:
    """Returns the text with replacements, except in fenced code."""
    parts = FENCE.split(text)
    return "".join(
        part if part.startswith("```") else pattern.sub(replace, part) for part in parts
    )


def _with_files(text: str, page: str, docs: Path) -> str:
    """Returns a page's text for the site. Copies the files that it links to; links to
    folders, which a site cannot show, become plain text.
    """
    folder = os.path.dirname(page)

    def adapted(link: re.Match[str]) -> str:
        name, heading = link[1], link[2] or ""
        if not name or name.startswith("http"):
            return link[0]
        target = os.path.normpath(os.path.join(folder, name))
        if not target.endswith(".md") and (ROOT / target).is_file():
            copy = docs / _published(target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / target, copy)
        base = os.path.dirname(_published(page))
        return f"]({os.path.relpath(_published(target), base or '.')}{heading})"

    def unlinked(link: re.Match[str]) -> str:
        return link[1] if (ROOT / folder / link[2]).is_dir() else link[0]

    text = _outside_code(re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)\)"), unlinked, text)
    return _outside_code(LINK, adapted, text)


def _other_pages() -> Nav:
    """Returns the pages of the repository that `MAIN` does not have, by folder."""
    main = {page for _, part in MAIN for page in _pages_of(part)}
    groups: dict[str, list[tuple[str, str]]] = {}
    for path in readmes():
        if str(path) not in main:
            title = (ROOT / path).read_text("utf-8").splitlines()[0].removeprefix("# ")
            folder = path.parts[0].replace(".github", "project")
            groups.setdefault(folder, []).append((title, str(path)))
    return [*groups.items()]


def _pages_of(part: "str | Nav") -> Iterator[str]:
    if isinstance(part, str):
        yield part
        return
    for _, inner in part:
        yield from _pages_of(inner)


def _toml(part: "str | Nav") -> str:
    """Returns an entry of the list of pages in TOML."""
    if isinstance(part, str):
        return json.dumps(_published(part))
    entries = (f"{{ {json.dumps(title)} = {_toml(inner)} }}" for title, inner in part)
    return f"[{', '.join(entries)}]"


def write_settings(folder: Path) -> None:
    """Write zensical.toml with the list of pages."""
    nav = _toml((*MAIN, ("All folders", _other_pages())))
    settings = (HERE / "zensical.toml").read_text("utf-8")
    settings = settings.replace("[project]\n", f"[project]\nnav = {nav}\n", 1)
    (folder / "zensical.toml").write_text(settings, "utf-8")


def build(folder: Path, *, docs_only: bool = False) -> int:
    """Build the site in a folder; returns the exit code."""
    shutil.rmtree(folder / "docs", ignore_errors=True)
    write_docs(folder / "docs")
    write_settings(folder)
    if docs_only:
        return 0
    if find_spec("zensical") is None:
        sys.exit(f"build_site: zensical is not installed: {how_to_install('docs')}")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", action="store_true", help="only write the pages")
    options = parser.parse_args()
    sys.exit(build(options.folder, docs_only=options.docs))
