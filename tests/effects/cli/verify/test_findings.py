"""What findings come to."""

from minfer.effects.cli.verify.findings import Check, judge, verdict


def test_what_is_bad_is_counted_and_the_first_reported() -> None:
    assert judge("ids", [], "5 ids") == Check("ids", "pass", "5 ids")
    assert judge("ids", ["a"], "5 ids") == Check("ids", "fail", "5 ids; a")
    bad = ["a", "b", "c"]
    assert judge("ids", bad, "5 ids") == Check("ids", "fail", "5 ids; a (and 2 more)")


def test_notes_and_what_was_skipped_are_no_faults() -> None:
    findings = [Check("a", "note", ""), Check("b", "skipped", ""), Check("c", "pass", "")]
    assert verdict(findings) == "supported"


def test_what_fails_comes_before_random_weights_in_the_verdict() -> None:
    findings = [Check("sanity", "random", ""), Check("ids", "fail", "")]
    assert verdict(findings) == "NOT supported: ids"
