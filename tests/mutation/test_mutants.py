"""The mutation tool: what it changes, how it names and chooses, and how it
judges a run.
"""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from attrs import evolve

from tests.circles import long
from tests.core import mutants
from tests.core.equivalents import EQUIVALENT
from tests.mutation import catalogue, loader, runner
from tests.mutation.catalogue import KINDS, Mutant
from tests.mutation.operators import RULES, changed, spots
from tests.mutation.plugin import ENDLESS, RUN_CPU, UNFINISHED
from tests.mutation.runner import Fate

SOURCE = '''
LIMIT = 3

def f(a: int, b=1):
    """1 < 2."""
    if a < b and not a:
        raise ValueError(f"{a + 1} is wrong")
    self.x = min(a, b)
    return evolve(r, a=a, b=-(-a // 2))[a:b]

class C:
    field: int = 5
    def g(self):
        self.n += 1
        return [x for x in reversed(y) if x is None]
'''


def made(source: str, rule: str) -> list[tuple[str, str]]:
    return [(s.before, s.after) for s in spots(ast.parse(source)) if s.rule == rule]


def test_each_rule_makes_what_it_says() -> None:
    assert made(SOURCE, "comparison") == [
        ("a < b", "a <= b"),
        ("x is None", "x is not None"),
    ]
    assert ("a < b and (not a)", "not a") in made(SOURCE, "condition")
    assert ("if a < b and (not a)", "if False") in made(SOURCE, "condition")
    assert ("for x in reversed(y) if x is None", "for x in reversed(y)") in [
        (before.strip(), after.strip()) for before, after in made(SOURCE, "condition")
    ]
    assert ("not a", "a") in made(SOURCE, "negation")
    assert ("-(-a // 2)", "a // 2") in made(SOURCE, "negation")
    assert ("min(a, b)", "max(a, b)") in made(SOURCE, "swap")
    assert made(SOURCE, "bound") == [
        ("min(a, b)", "a"),
        ("min(a, b)", "b"),
        ("reversed(y)", "y"),
    ]
    assert ("a:b", "a:") in made(SOURCE, "slice")
    assert [after for _, after in made(SOURCE, "update")] == [
        "evolve(r, b=-(-a // 2))",
        "evolve(r, a=a)",
    ]
    assert made(SOURCE, "statement") == [
        ("self.x = min(a, b)", "pass"),
        ("self.n += 1", "pass"),
        ("self.n += 1", "self.n -= 1"),
    ]
    assert {s.rule for s in spots(ast.parse(SOURCE))} <= set(RULES) == set(KINDS)


def test_words_defaults_and_what_is_outside_of_functions_stay() -> None:
    numbers = {before for before, _ in made(SOURCE, "offset")}
    assert numbers == {"2", "1"}, "that of the ceiling and that of the sum"
    assert not made("def f():\n    return zip(a, b, strict=True)", "constant")
    assert not made("def f():\n    raise ValueError(1 + 2)", "offset")


def test_a_change_is_at_its_spot_and_the_tree_stays_as_it_was() -> None:
    tree = ast.parse(SOURCE)
    before = ast.dump(tree)
    for spot in spots(tree):
        new = changed(tree, spot)
        assert ast.dump(new) != before
        compile(ast.fix_missing_locations(new), "source", "exec")
    assert ast.dump(tree) == before


def test_names_do_not_depend_on_the_layout() -> None:
    spread = SOURCE.replace("a < b and not a", "(a\n   <  b  # is it?\n   and not a)")
    names = [(s.function, s.rule, s.before, s.after) for s in spots(ast.parse(SOURCE))]
    assert names == [
        (s.function, s.rule, s.before, s.after) for s in spots(ast.parse(spread))
    ]


@pytest.mark.long
def test_the_core_has_enough_mutants_each_of_its_own_name_and_each_compiles() -> None:
    chosen = catalogue.chosen(catalogue.files())
    assert len(chosen) >= 250
    assert len({mutant.key for mutant in chosen}) == len(chosen)
    for mutant in catalogue.chosen(["planning/admit.py", "records/waiting.py"]):
        assert catalogue.named(mutant.key).key == mutant.key
        compile(ast.fix_missing_locations(catalogue.tree(mutant)), mutant.file, "exec")


def test_at_most_so_many_of_a_kind_in_a_function_and_others_do_not_matter() -> None:
    chosen = catalogue.chosen(["planning/admit.py", "blocks/ownership.py"])
    kinds = [
        (mutant.file, mutant.spot.function, KINDS[mutant.spot.rule]) for mutant in chosen
    ]
    assert len(set(kinds)) == len(kinds)
    solo = [mutant.key for mutant in catalogue.chosen(["blocks/ownership.py"])]
    assert solo == [
        mutant.key for mutant in chosen if mutant.file == "blocks/ownership.py"
    ]


def test_every_file_of_the_core_is_mutated_or_left_out_with_a_reason() -> None:
    paths = catalogue.CORE.rglob("*.py")
    names = {path.relative_to(catalogue.CORE).as_posix() for path in paths}
    assert set(catalogue.LEFT_OUT) <= names
    assert all(catalogue.LEFT_OUT.values())
    assert "speculate/accept.py" in catalogue.files()
    for file in catalogue.files():
        assert catalogue.all_of(file), file


def test_a_name_that_is_nobodys_is_an_error() -> None:
    with pytest.raises(LookupError, match="no such mutant"):
        catalogue.named("admit.py | admit | sum | 1 -> 2")
    with pytest.raises(LookupError, match="no such mutant"):
        catalogue.named("nothing")


def test_a_module_is_imported_with_its_tree_changed_and_no_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_module.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def change(tree: ast.Module) -> ast.Module:
        return changed(tree, next(spot for spot in spots(tree) if spot.after == "2"))

    loader.install({"some_module": change})
    assert importlib.import_module("some_module").f() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["some_module.py"]
    with pytest.raises(ImportError, match="imported before"):
        loader.install({"some_module": change})
    monkeypatch.delitem(sys.modules, "some_module")


START = {"test": "t::one", "cpu": 2.0}
LATE = {"test": "t::two", "cpu": RUN_CPU - 2.0}  # a test that began near a run's end


@pytest.mark.parametrize(
    ("status", "emitted", "outcome", "failed_test"),
    [
        (0, [START], "survived", ""),
        (1, [START, {"failed": "t::one", "cpu": 3.0}], "killed", "t::one"),
        (2, [], "killed", "import"),
        (ENDLESS, [START], "endless", "t::one"),
        (UNFINISHED, [START, LATE], "unfinished", "t::two"),
        (-9, [START], "endless", "t::one"),
        (-9, [START, LATE], "unfinished", "t::two"),
    ],
)
def test_what_an_exit_status_means(
    status: int, emitted: list[dict[str, object]], outcome: str, failed_test: str
) -> None:
    assert runner._judged(status, emitted) == (outcome, failed_test)


def some(count: int) -> list[Mutant]:
    return catalogue.chosen(catalogue.files())[:count]


def fates(count: int, outcome: str) -> list[Fate]:
    return [
        Fate(mutant.key, catalogue.source_of(mutant.file), "tests", outcome, "", 1.0)
        for mutant in some(count)
    ]


def test_a_verdict_counts_survivors_and_lists_that_do_not_hold() -> None:
    killed, alive = fates(4, "killed")[:3], fates(4, "survived")[3:]
    verdict = mutants.judged([*killed, *alive], [])
    assert [fate.key for fate in verdict.survivors] == [alive[0].key]
    assert (verdict.share, verdict.equivalent) == (0.75, 0)
    assert mutants.report(verdict) == 1
    verdict = mutants.judged([*killed, *alive], [alive[0].key])
    assert (verdict.share, verdict.equivalent, verdict.survivors) == (1.0, 1, ())
    assert mutants.report(verdict) == 0
    refuted = mutants.judged([*killed, *alive], [alive[0].key, killed[0].key])
    assert refuted.refuted == (killed[0].key,)
    assert mutants.report(refuted) == 1
    outdated = mutants.judged(killed, ["admit.py | nobody | swap | a -> b"])
    assert outdated.gone == ("admit.py | nobody | swap | a -> b",)
    assert mutants.report(outdated) == 1
    assert mutants.judged(fates(3, "unfinished"), []).share == 0.0, "no time is no kill"
    assert mutants.judged(fates(3, "endless"), []).share == 1.0


def test_too_many_equivalents_are_too_many() -> None:
    killed = fates(200, "killed")
    equal = [evolve(fate, outcome="survived") for fate in killed[:21]]
    verdict = mutants.judged([*equal, *killed[21:]], [fate.key for fate in equal])
    assert verdict.share == 1.0
    assert mutants.report(verdict) == 1
    allowed = mutants.judged(
        [*equal[:20], *killed[20:]], [fate.key for fate in equal[:20]]
    )
    assert mutants.report(allowed) == 0


def test_results_are_kept_and_hold_as_long_as_what_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(mutant: Mutant, tests: str) -> Fate:
        ran.append(mutant.key)
        outcome = "killed" if mutant.spot.rule == "comparison" else "survived"
        return Fate(
            mutant.key, catalogue.source_of(mutant.file), tests, outcome, "t", 1.0
        )

    monkeypatch.setattr(runner, "run", run)
    out, mutants_run = tmp_path / "out.jsonl", some(20)
    first = runner.run_all(mutants_run, 2, out, lambda _: None)
    assert [fate.key for fate in first] == [mutant.key for mutant in mutants_run]
    assert sorted(ran) == sorted(mutant.key for mutant in mutants_run)
    ran.clear()
    assert runner.run_all(mutants_run, 2, out, lambda _: None) == first
    assert not ran
    monkeypatch.setattr(runner, "tests_digest", lambda: "other tests")
    runner.run_all(mutants_run, 2, out, lambda _: None)
    assert set(ran) == {fate.key for fate in first if not fate.dead}, (
        "what is dead stays dead"
    )
    assert len(out.read_text().splitlines()) == 20 + len(ran)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    out.write_text(
        "".join(json.dumps({**line, "source": "other"}) + "\n" for line in lines)
    )
    ran.clear()
    runner.run_all(mutants_run, 2, out, lambda _: None)
    killed = {fate.key for fate in first if fate.dead}
    assert killed <= set(ran), "unless the file has changed"


def test_tests_that_cannot_notice_are_not_run() -> None:
    assert (
        runner.test_files("sampling/reference_sampler.py")[0]
        == "tests/core/sampling/test_reference_sampler.py"
    )
    assert "tests/core/values/test_log.py" not in runner.test_files(
        "speculate/rejection.py"
    )
    assert runner.test_files("blocks/keys.py")[0] == "tests/core/blocks/test_keys.py"
    assert "tests/mutation/worlds.py" in runner.test_files("blocks/keys.py")
    assert runner.test_files("speculate/lookup.py") == [
        "tests/core/speculate/test_lookup.py"
    ]
    everything = runner.test_files("")
    assert not {path.rpartition("/")[2] for path in everything} & set(runner.NOT_RUN)
    assert "tests/core/testing/test_invariants.py" in everything
    followers = ("tests/core/journal/", "tests/core/analysis/", "tests/core/simulation/")
    assert not [path for path in everything if path.startswith(followers)]
    assert "test_swarm.py" in runner.NOT_RUN


def test_tests_that_are_named_for_a_file_are_there() -> None:
    named = {test for tests in runner.ALSO.values() for test in tests} | {*runner.LAST}
    assert {test for test in named if not (runner.TESTS / test).is_file()} == set()


def test_every_equivalent_is_there_and_argued() -> None:
    for key, argument in EQUIVALENT.items():
        catalogue.named(key)
        assert len(argument) > 20, key


@pytest.mark.long
@pytest.mark.parametrize(
    "key",
    [
        (
            "blocks/keys.py | block_key | term | "
            "parent + array('I', tokens).tobytes() -> parent"
        ),
        *long(["records/waiting.py | WaitingQueue.first | offset | 0 -> 1"]),
    ],
)
def test_a_mutant_is_killed_in_a_process_of_its_own(key: str) -> None:
    fate = runner.run(catalogue.named(key), "tests")
    assert fate.outcome == "killed"
    folder, _, name = key.partition(".")[0].rpartition("/")
    assert fate.by.startswith(f"tests/core/{folder}/test_{name}.py::")
    assert 0 < fate.cpu < 30
