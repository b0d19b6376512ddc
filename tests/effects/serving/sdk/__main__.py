"""How many cases pass with the clients that are installed here:

python -m tests.effects.serving.sdk
"""

import sys
import tempfile
import traceback
from pathlib import Path

from attrs import define

from tests.effects.serving.sdk.cases import Case
from tests.effects.serving.sdk.servers import Servers
from tests.effects.serving.sdk.tables import TABLES


@define
class Score:
    """What came of the cases of one client."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


def tried(case: Case, servers: Servers, score: Score) -> None:
    """Run a case, and say what is wrong with it."""
    if reason := case.lacks():
        score.skipped += 1
        print(f"  skipped: {case.says}: {reason}")
        return
    try:
        case.run(servers)
    except Exception:
        score.failed += 1
        print(f"  FAILED: {case.says}\n{traceback.format_exc()}")
    else:
        score.passed += 1


def main() -> int:
    """Run all; returns the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder))
        try:
            for table in TABLES:
                score = Score()
                for case in table:
                    tried(case, servers, score)
                run = score.passed + score.failed
                skipped = f", {score.skipped} skipped" if score.skipped else ""
                says = f"{score.passed} of {run} pass{skipped}"
                print(f"{table.client} {table.version}: {says}")
                failed += score.failed
        finally:
            servers.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
