"""Mutants that no test can kill, as they decide the same: each with the argument.

Keyed by the mutant's name (file, function, rule, expression before and after), as `python
-m tests.core.mutants` prints it. An entry whose mutant is gone, or is killed, is an
error.
"""

from typing import Final

EQUIVALENT: Final[dict[str, str]] = {
    "speculate/lookup.py | Lookup._publish | term | state.clock + 1 -> state.clock": (
        "A clock: all scopes are written by it one earlier, in the same order."
    ),
    "blocks/prefix.py | PrefixChange.add_idle | offset | 1 -> 2 | 2": (
        "A clock: that it goes on is all that is asked of it."
    ),
    "planning/prefix_hit.py | _find_blocks | offset | 1 -> 2": (
        "No hit has a number of blocks below zero: there is a first round."
    ),
    "policies/mistakes.py | misnamed_methods | offset | 1 -> 2": (
        "Of the nearest names only the first one is used."
    ),
    "sampling/vllm_names.py | _without_absent | offset | 1 -> 2": (
        "Of the nearest names only the first one is used."
    ),
    "speculate/rejection.py | sample_draft | slice | :num_prompt_tokens -> :": (
        "The prompt is looked up for the tokens that are penalized at all, as those of "
        "the output are."
    ),
    "tiers/store.py | _store_in_host | term | room - batch.room -> room": (
        "A shortcut: where there is room for what is needed, the same blocks are "
        "collected with that as the bound."
    ),
    "blocks/prefix.py | PrefixChange._without_holder | offset | 1 -> 2 | 2": (
        "A clock: that it goes on is all that is asked of it."
    ),
    (
        "blocks/window.py | unreleased | condition | (*blocks[start:min(stop, sinks)], "
        "*behind) if start < sinks else behind -> (*blocks[start:min(stop, sinks)], *behind)"
    ): "A shortcut: from the end of the sink blocks on, what is kept of them is nothing.",
    "speculate/learn.py | _update_samples | term | step - 1 -> step": (
        "A shortcut: there are no steps between one and the next, in which a record rests."
    ),
    (
        "blocks/prefix.py | PrefixChange.can_evict | condition | if self.held is None or "
        "count > self.idlers -> if False"
    ): (
        "A shortcut: where nothing is held all idle blocks are counted, and never more "
        "than there are."
    ),
    "routing/stored_blocks.py | _take | comparison | begin < len(keys) -> begin <= len(keys)": (
        "From the end of the keys on there is no run."
    ),
    (
        "routing/stored_blocks.py | _chains | condition | if seq.request.id in loading -> "
        "if True"
    ): "A shortcut: a key is of the same tokens, in whichever sequence it is found.",
    (
        "sampling/beam.py | _is_over | comparison | params.length_penalty > 0 -> "
        "params.length_penalty >= 0"
    ): "With a penalty of zero scores are divided by one, whatever the length.",
    "sampling/reference_sampler.py | _deviations | swap | depth[t] - mean -> mean - depth[t]": (
        "Of the difference only the magnitude is taken."
    ),
    (
        "tiers/finish.py | _release | condition | change.prefix.release if "
        "transfer.kind.to_device else change.prefix.unpin -> change.prefix.unpin"
    ): (
        "A block that is both held and pinned stays until both are given back, in either "
        "order; one that is not pinned is released by both."
    ),
    "blocks/window.py | unreleased | comparison | start < sinks -> start <= sinks": (
        "A shortcut: from the end of the sink blocks on, what is kept of them is nothing."
    ),
    "records/sequence.py | _place_among | offset | 0 -> -1": (
        "Who is joined is a single row: its first sequence is its last one."
    ),
    (
        "planning/schedule.py | _admit | condition | if builder.state.running.run_ids is not "
        "before -> if True"
    ): "A shortcut: if nobody was displaced there is nobody to forget.",
    (
        "lifecycle/arrive.py | rejection_reason | swap | "
        "queue_is_full(len(state.waiting) + coming, request.n, config.max_waiting) -> "
        "queue_is_full(request.n, len(state.waiting) + coming, config.max_waiting)"
    ): "The two numbers are only added, and a sum has no order.",
    "records/state.py | place_is_taken | slice | index:index + 1 -> index:": (
        "Places are in order and each is there once: none behind that one is equal."
    ),
    "planning/schedule.py | _admit | offset | 0 -> -1": (
        "A newcomer's seat is a single row: its first sequence is its last one."
    ),
    "sampling/logits.py | penalize | comparison | x > 0 -> x >= 0": (
        "A logit of zero is itself, divided by a factor above zero or multiplied by it."
    ),
    "sampling/reference_sampler.py | next_token | slice | :num_prompt_tokens -> :num_prompt_tokens + 1": (
        "The prompt is looked up for the tokens that are penalized at all, as those of "
        "the output are: that one is the output's first."
    ),
    (
        "planning/admit.py | _shortage | comparison | pages_if_uncached(config, seq, runs_alone=runs_alone) <= room "
        "-> pages_if_uncached(config, seq, runs_alone=runs_alone) < room"
    ): (
        "A shortcut: what is needed is never more than what would be needed with nothing "
        "cached, so that the exact number, then asked for, says the same."
    ),
    "planning/prefix_hit.py | _pages_of_chain | comparison | len(tables[g]) > end -> len(tables[g]) >= end": (
        "A neighbour's table is a shortcut to the blocks that the index gives one by "
        "one: a table that ends with the last of them gives the same."
    ),
    (
        "planning/prefix_hit.py | _pages_of_chain | negation | -thresholds.NEIGHBOURS -> thresholds.NEIGHBOURS"
    ): (
        "A neighbour's table is a shortcut to the blocks that the index gives one by "
        "one: whose are looked at decides nothing."
    ),
    "planning/prefix_hit.py | _pages_of_chain | condition | if len(tables[g]) > end and tables[g][end - 1] == last -> "
    "if False": (
        "A neighbour's table is a shortcut to the blocks that the index gives one by "
        "one: without it they are looked up."
    ),
    "planning/prefix_hit.py | find_hit | offset | 1 -> 0": (
        "A hit of no block cannot be shortened: without the first round it stays what it "
        "is."
    ),
    "planning/prefix_hit.py | _pages_of_chain | offset | 1 -> 0": (
        "The last page of the last block is the last page of all blocks."
    ),
    "planning/prefix_hit.py | _pages_of_chain | offset | 1 -> 0 | 1": (
        "A neighbour's table is a shortcut: the first page of the last block is not at "
        "the place of its last one, unless it is both, and blocks are looked up one by one."
    ),
    "planning/prefix_hit.py | _pages_of_chain | offset | 1 -> 0 | 2": (
        "A neighbour's table is a shortcut: a published block has one place in every "
        "table that holds it, so that it is not found one place behind, and the blocks "
        "are looked up one by one."
    ),
    "planning/prefix_hit.py | _pages_of_chain | swap | end - 1 -> 1 - end": (
        "A neighbour's table is a shortcut to the blocks that the index gives one by "
        "one: a published block has one place in every table that holds it, so that a "
        "table in which it is found anywhere has the same path before it."
    ),
    "planning/commit.py | _drop_after_ends | comparison | keep < len(new[i]) -> keep <= len(new[i])": (
        "Where all is kept, what is taken back is nothing."
    ),
    (
        "planning/commit.py | _drop_after_ends | condition | for i, (keep, _) in ends.items() if keep < "
        "len(new[i]) -> for i, (keep, _) in ends.items()"
    ): (
        "keep is at most what came; where it is all of it, what is taken back is nothing."
    ),
    (
        "planning/commit.py | _drop_after_ends | update | edited(run, known={i: run.known[i] - count for i, "
        "count in extra.items()}, fresh=cut) -> edited(run, known={i: run.known[i] - "
        "count for i, count in extra.items()})"
    ): (
        "Who is cut leaves in this turn, and keys are given only to blocks below what "
        "is known: the tokens beyond are never looked at."
    ),
    (
        "planning/commit.py | _endings | swap | run.known[i] - len(sampled) -> len(sampled) - "
        "run.known[i]"
    ): (
        "Makes room larger. No plan lets a row yield beyond its last token, so that "
        "room is never less than what came; and of an end by length only the comparison "
        "with that is used."
    ),
    (
        "policies/consult.py | _with_policy | condition | state if policy is state.policy else "
        "evolve(state, policy=policy) -> evolve(state, policy=policy)"
    ): ("A shortcut: with the policy's state that it has, the state is equal."),
    (
        "policies/consult.py | may_preempt | comparison | first > running -> first >= running"
    ): ("Places are never equal: arrival and sample are part of them."),
    (
        "engine.py | _fold | condition | for event in events if isinstance(event, "
        "Submit) -> for event in events"
    ): ("For the type checker: only events of one kind are folded together."),
    (
        "planning/grow.py | _take | condition | allocated.pages if allocated else () -> allocated.pages"
    ): ("For the type checker: the caller has counted that there are as many."),
    (
        "lifecycle/committed.py | all_committed | condition | reversed(state.inflight) if not_yielded "
        "else () -> reversed(state.inflight)"
    ): ("A shortcut: of no generations, none is found in the plans either."),
    "lifecycle/ending.py | end_samples | condition | if waiting -> if True": (
        "A shortcut: a line from which nobody is removed is equal."
    ),
    "lifecycle/publish.py | compute_keys | comparison | upto <= have -> upto < have": (
        "With as many keys as are asked for, none is made and no token leaves the tail: "
        "the chain is equal."
    ),
    (
        "lifecycle/retire.py | release_sequence | comparison | upto > min(chain.sealed) -> upto >= min(chain.sealed)"
    ): ("A shortcut: where all is published, there is nothing to name or to publish."),
    "values/log.py | Log.__getitem__ | comparison | start >= cut -> start > cut": (
        "At start == cut the other branch joins no old entry to the same recent ones."
    ),
    "lifecycle/pausing.py | all_paused | condition | bool(paused) and len(paused) >= len(run) -> "
    "bool(paused)": (
        "A shortcut: who rests is paused, so that of more who run not all rest."
    ),
    "policies/builtin.py | Ageing.may_preempt | offset | 0 -> -1": (
        "A rank of this policy is one number: its first is its last."
    ),
    "policies/builtin.py | Fair.admitted | offset | 0 -> -1": (
        "A rank of this policy is one number: its first is its last."
    ),
    (
        "records/request.py | Request._check_types | comparison | self.deadline >= 0 -> "
        "self.deadline > 0"
    ): ("A deadline of 0 then goes through the whole check, which it passes."),
    (
        "blocks/prefix.py | lookup | condition | if not keys or group_key(keys[0], group) not in nodes -> "
        "if False"
    ): (
        "A shortcut: chains have no gaps, so that where the first key is not cached, the "
        "search ends with none; nor does anybody ask for more keys than there are."
    ),
    "records/messages.py | Tick.__attrs_post_init__ | negation | -inf -> inf": (
        "A shortcut: every time then goes through the whole check, which says the same."
    ),
    "records/request.py | Request._check_types | offset | 0 -> 1 | 1": (
        "A deadline below 1 then goes through the whole check, which says the same."
    ),
    "sampling/logits.py | f32 | offset | 0 -> -1": (
        "Of one entry the first is the last."
    ),
    (
        "records/sequence.py | Running.inputs | comparison | stop <= len(history) -> stop < "
        "len(history)"
    ): (
        "Which way is taken to the same tokens: history from the last block's end on is "
        "in the tail, too."
    ),
    (
        "records/sequence.py | positions | condition | list(compress(range(len(run)), "
        "map(run_ids.__contains__, run.run_ids))) if run_ids else [] -> "
        "list(compress(range(len(run)), map(run_ids.__contains__, run.run_ids)))"
    ): ("A shortcut: of no generations, none is found in the columns either."),
    (
        "speculate/length.py | _depths | bound | sorted({min(depth, deepest) for depth "
        "in (*_DEPTHS, deepest)} - {0}) -> {min(depth, deepest) for depth in "
        "(*_DEPTHS, deepest)} - {0}"
    ): "Sets of small numbers happen to be in order; of depths that tie, the first wins.",
    "records/acceptance.py | Acceptance.updated | comparison | count <= learning.most -> count < "
    "learning.most": ("Scaled to as many as there are, they stay the same."),
    (
        "speculate/length.py | _expected_tokens | comparison | min(likely) >= _MIN_EXPECTED_TOKENS -> "
        "min(likely) > _MIN_EXPECTED_TOKENS"
    ): "A shortcut: where nothing is cut off, both ways find the same.",
    "speculate/length.py | _rectangles | comparison | count > 0 -> count >= 0": (
        "With none the rate is that of no drafts at most, which is no better."
    ),
    "speculate/lookup.py | Lookup._publish | offset | 1 -> 2 | 1": (
        "A clock: that it goes on is all that is asked of it."
    ),
    "speculate/tally.py | DraftTally.plus | swap | _sum(self.proposed, other.proposed) -> "
    "_sum(other.proposed, self.proposed)": (
        "Of two numbers, which is added to which is the same."
    ),
    "speculate/tally.py | DraftTally.plus | swap | _sum(self.accepted, other.accepted) -> "
    "_sum(other.accepted, self.accepted)": (
        "Of two numbers, which is added to which is the same."
    ),
    "speculate/tally.py | _sum | swap | zip_longest(left, right, fillvalue=0) -> "
    "zip_longest(right, left, fillvalue=0)": (
        "Of two numbers, which is added to which is the same."
    ),
    "planning/plan_drafts.py | Drafters.only | condition | if all(chosen) -> if False": (
        "A shortcut: the columns of all that are chosen are equal."
    ),
    "planning/plan_drafts.py | _assign | condition | if not drafters -> if False": (
        "A shortcut: without drafts each row yields one token, which is what none means."
    ),
    "planning/plan_drafts.py | _bounded | comparison | max_drafts < spec_config.drafts -> max_drafts <= spec_config.drafts": (
        "A shortcut: nobody has more than how.drafts drafts."
    ),
    (
        "planning/plan_drafts.py | waits_for_results | condition | not "
        "state.drafting.proposals or 0 < spec_config.rows < rows -> 0 < spec_config.rows < rows"
    ): "A shortcut: where nothing is proposed nobody is found who would have drafts.",
    (
        "speculate/proposing.py | keep_proposals | bound | "
        "frozenset(state.running.ids) -> state.running.ids"
    ): "A set for speed: both have the same members.",
    (
        "records/waiting.py | _with_counts | condition | Counter(names).items() if "
        "len(names) > 1 else [(name, 1) for name in names] -> "
        "[(name, 1) for name in names]"
    ): "Those of a name are counted at once for speed: one by one they are as many.",
    (
        "records/waiting.py | _with_counts | condition | Counter(names).items() if "
        "len(names) > 1 else [(name, 1) for name in names] -> Counter(names).items()"
    ): "A shortcut: one name is counted either way.",
    "records/waiting.py | _with_counts | comparison | len(names) > 1 -> len(names) >= 1": (
        "A shortcut: of one name, one is counted either way."
    ),
    "records/request.py | Request.__attrs_post_init__ | offset | 1 -> 2": (
        "Where the search for the largest begins: without tokens, the prompt's is -1."
    ),
    "blocks/pool.py | PoolChange.take | comparison | short > 0 -> short >= 0": (
        "Of fresh pages none is taken where none is short."
    ),
    "planning/commit.py | _advance | condition | if sizes != plan.max_sampled_tokens -> if True": (
        "A shortcut: where no row yielded fewer, nothing is subtracted."
    ),
    (
        "lifecycle/committed.py | all_committed | condition | copied and "
        "run.tables[i][0][block * pages] in copied -> run.tables[i][0][block * pages] in "
        "copied"
    ): "A shortcut: no page is among none.",
    (
        "lifecycle/publish.py | publish_blocks | condition | _publish(config, state, upto) "
        "if upto else state -> _publish(config, state, upto)"
    ): "A shortcut: where nobody has a block to publish, the state is equal.",
    "lifecycle/publish.py | _publish | offset | 0 -> -1": (
        "Where the number is not computed no group has a window, and nobody looks at it."
    ),
    "planning/schedule.py | _find_skipped_rows | condition | if builder.state.needs_host_mask -> if True": (
        "A shortcut: where nobody is in lockstep, nobody is found, and the state is equal."
    ),
    (
        "planning/plan_drafts.py | _candidates | condition | if state.needs_host_mask or "
        "state.filling -> if True"
    ): "A shortcut: of decode rows that are not in lockstep, all may have drafts.",
    "speculate/learn.py | _update_samples | condition | if plan.run_ids == run.run_ids -> if False": (
        "A shortcut: looked up by generation, the names are the same."
    ),
    (
        "sampling/logits.py | hidden_ids | condition | num_before <= len(output) and "
        "tuple(output[len(output) - num_before:]) == word[:-1] -> "
        "tuple(output[len(output) - num_before:]) == word[:-1]"
    ): "No part of a shorter output is equal to a longer word.",
    "values/tickets.py | add | condition | if word -> if False": (
        "A shortcut: above a word that has bits, the bits are there."
    ),
    "planning/discard.py | discard | bound | set(plan.run_ids) -> plan.run_ids": (
        "A set for speed: both have the same members."
    ),
}
