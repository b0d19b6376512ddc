"""Which of several requests of one id a turn took on."""

from minfer.effects.runs.page.make import page
from minfer.records.config import EngineConfig
from tests.effects.runs.page.scenes import requested, turns_of, unpacked


def test_a_sample_keeps_its_name_when_another_request_is_ignored_or_refused() -> None:
    config = EngineConfig(num_blocks=40, block_size=4, depth=1)
    turns = turns_of(
        config,
        {
            0: [requested("same", 8, 9)],
            2: [requested("same", 4, 4)],
            30: [requested("same", 400, 2), requested("same", 4, 2)],
        },
    )
    data = page("run", config, turns)
    head, columns = unpacked(data)
    ends = [
        (sample, head["texts"][a])
        for sample, a, kind in zip(
            columns["log.sample"], columns["log.a"], columns["log.kind"], strict=True
        )
        if [*head["kinds"]][kind] == "Finished"
    ]
    assert ends == [(0, "length"), (1, "rejected"), (2, "length")]
    assert columns["sample.prompt"] == [8, 400, 4]
