"""The commands that read journals, on those with wrong content behind right checksums."""

from collections import Counter
from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from tests.circles import claimed
from tests.core.journal.crafted import crafted
from tests.core.journal.test_crafted import FILE, journals

COMMANDS = (
    ("replay",),
    ("replay", "--json"),
    ("replay", "--at", "9"),
    ("explain",),
    ("explain", "r1"),
    ("view", "-o", "page.html"),
    ("simulate",),
)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(8), *claimed([range(8, 400)])])
def test_no_command_ends_in_a_traceback(
    seeds: range,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It does what it can, or names the file and the place."""
    monkeypatch.chdir(tmp_path)
    codes, file = Counter[int](), tmp_path / FILE
    for seed in seeds:
        runs = journals()
        file.write_bytes(crafted(runs[seed % len(runs)], seed))
        for command, *options in COMMANDS:
            try:
                code = main([command, str(file), *options])
            except SystemExit as error:
                raise AssertionError(f"seed {seed}: {command} {options}") from error
            codes[code] += 1
            printed = capsys.readouterr()
            assert code in (0, 1, 2, 3), printed
            if code == 2:
                named = FILE in printed.err or "there is no turn 9" in printed.err
                assert named, (seed, command, printed.err)
    assert min(codes[0], codes[2]) > 2, codes
