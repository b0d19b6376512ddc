"""What clients are told of what went wrong."""

import json
from functools import partial

from tests.effects.served import serving
from tests.effects.serving.wire import SLOW, asking


def test_a_full_line_is_503_with_retry_after(folder: str) -> None:
    with serving(folder, max_num_seqs=1, max_waiting=2, **SLOW) as served:
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}

        def one_runs(line: int) -> bool:
            state = served.llm.worker.driver.state
            return (len(state.running), len(state.waiting)) == (1, line)

        links = []
        for count in range(3):
            links.append(asking(served, json.dumps(body).encode()))
            served.until(partial(one_runs, count))
        found = served.post("completions", **body)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.json()["error"]["code"] == "overloaded"
        for link in links:
            link.close()
        served.idle()
        assert served.post("completions", prompt="x", max_tokens=1).status_code == 200
