"""Make what training needs, without a GPU: the corpus and the tokenizer, in one folder.

    python -m bench.bundled.prepare --folder .carry/bundled

The folder is all that the machine which trains has to be given; its conversations are
made there, from the seed.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Final

from bench.bundled import corpus
from bench.bundled.dialogues import any_dialogue
from bench.bundled.sources import collect
from bench.bundled.tasks.code import recipes
from bench.bundled.vocabulary import train

FOLDER: Final = Path(".carry/bundled")
CORPUS: Final = "corpus.json.xz"
TOKENIZER: Final = "tokenizer.json"
DIALOGUES: Final = 40_000  # of which the tokenizer is made, beside the sources
EVERY: Final = 4  # one source file of so many


def prepare(folder: Path, stdlib: Path | None = None) -> None:
    """Write the folder, and say what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = collect(stdlib)
    about = corpus.write(sources, folder / CORPUS)
    rng = Random(0)
    texts = [one.text for one in sources.trained if one.package == "python"]
    texts += [one.text for one in sources.trained if one.package != "python"][::EVERY]
    texts += [any_dialogue(rng).text() for _ in range(DIALOGUES)]
    texts += [recipe.code for recipe in recipes()] * 20
    tokenizer = train(texts)
    (folder / TOKENIZER).write_text(tokenizer.to_str(pretty=False), "utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print(
        json.dumps(
            {**about, "tokens": tokenizer.get_vocab_size(), "sizes": sizes}, indent=1
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--stdlib", type=Path, help="another Python's library")
    args = parser.parse_args()
    prepare(args.folder, args.stdlib)


if __name__ == "__main__":
    main()
