"""Texts and conversations for comparisons: code, prose, and hard cases of tokenizers."""

from typing import Final

CODE: Final = '''def read_lines(path):
    """Return the lines of a text file without their ends."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.rstrip()
            if line:
                lines.append(line)
    return lines
'''
PROSE: Final = (
    "The sun rose over the hills, and the people of the town began their day. A man\n"
    "opened the door of his shop and put a table outside, while a woman walked to the "
    "market to buy bread\n"
    "and milk. It was the first day of the year, and most of the children were still at "
    "home."
)
TEXTS: Final = (
    CODE,
    PROSE,
    "",
    " ",
    "  two\t tabs\t\n\n\n  and\r\nlines \u00a0 end  ",
    "x" * 300,
    (
        "naïve café, Größe; cafe\u0301 and A\u030angstro\u0308m "
        "\ufb01 \ufdfa \u00bd \u2167 ∑"
    ),
    "日本語のテキスト、한국어 שלום, مرحبا",
    "\x00\x07\x7f\u200b\u2028\ufeff",
    "emoji 😀 👨\u200d👩\u200d👧 🇨🇭 👍🏽, 1234567890 3.14159 0x1F 1e-9",
    "don't I'LL we've; snake_case camelCase <html> </s> [INST] <|im_start|>",
)
_ASKS: Final = {"role": "user", "content": "What is  a 'list' in <Python>? 🐍\n"}
_SAYS: Final = {"role": "assistant", "content": " A sequence.\n"}
TALKS: Final = (
    [_ASKS],
    [{"role": "system", "content": "Be brief."}, _ASKS],
    [_ASKS, _SAYS, _ASKS],
)
_PLACE: Final = {"type": "string", "description": "a town"}
_WANTED: Final = {"type": "object", "properties": {"place": _PLACE}}
TOOLS: Final = (
    {"type": "function", "function": {"name": "weather", "parameters": _WANTED}},
)


def cut_prompts(passages: list[list[int]], count: int) -> list[list[int]]:
    """Cut prompts of 20 to 67 tokens out of passages in turn, each from another place."""
    halves = [len(ids) // 2 for ids in passages]
    cuts = []
    for i in range(count):
        which = i % len(passages)
        begin = 7 * i % halves[which]
        cuts.append(passages[which][begin:][: 20 + 11 * i % 48])
    return cuts
