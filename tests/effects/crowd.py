"""A crowd of clients, half of which leave at random: what it does to the others, and to
the cache.

python -m tests.effects.crowd --clients 32 --rounds 20
"""

import argparse
import random
import tempfile
import threading
from pathlib import Path

import httpx
from attrs import frozen

from tests.effects.served import Serving, events, serving
from tests.effects.tiny_model import write_checkpoint

Texts = list[dict[int, str]]  # by client, then by choice


@frozen
class Found:
    """What a crowd of which half leaves was like, beside one that stays."""

    leaving: int
    # Clients that stayed and got something else than in the quiet run.
    differing: list[int]
    cancelled: int  # turns that took a Cancel
    # Of these, how many were followed within two turns by their blocks' return.
    taken: int
    left_over: int  # blocks that were held at the end


def crowd(served: Serving, clients: int, leaving: set[int], seed: int) -> Texts:
    """The texts of clients at once; those that leave do so at a random moment."""
    rng = random.Random(seed)
    texts: Texts = [{} for _ in range(clients)]
    leave_after = [rng.randrange(40) for _ in range(clients)]
    streamed = [rng.random() < 0.75 for _ in range(clients)]

    def one(i: int) -> None:
        body = {
            "prompt": f"client {i} " * (1 + i % 7),
            "seed": i,
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": True,
            "n": 1 + i % 3 // 2,
        }
        url = f"{served.url}/v1/completions"
        if i in leaving and not streamed[i]:
            try:
                served.http.post(
                    url,
                    json={**body, "stream": False},
                    timeout=0.05 + leave_after[i] / 800,
                )
            except httpx.TimeoutException:
                return
        with served.http.stream("POST", url, json=body) as answer:
            for count, event in enumerate(events(answer.iter_lines())):
                for choice in event["choices"]:
                    old = texts[i].get(choice["index"], "")
                    texts[i][choice["index"]] = old + choice["text"]
                if i in leaving and count >= leave_after[i]:
                    return

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def compared(folder: str, *, clients: int, seed: int) -> Found:
    """One crowd of which half leaves, and the same crowd when all stay."""
    leaving = set(random.Random(seed).sample(range(clients), clients // 2))
    settings = {
        "num_gpu_blocks_override": 400,
        "block_size": 8,
        "max_num_seqs": 24,
        "max_model_len": 400,
        "executor": "oracle",
        "step": 0.002,
    }
    # Of several kinds.
    with serving(folder, **settings) as served:  # type: ignore[arg-type]
        available_before = served.available()
        disturbed = crowd(served, clients, leaving, seed)
        served.idle()
        num_held = available_before - served.available()
        turns = served.cancelled()
        quiet = crowd(served, clients, set(), seed)
    assert all(quiet)
    stayed = [i for i in range(clients) if i not in leaving]
    return Found(
        leaving=len(leaving),
        differing=[i for i in stayed if disturbed[i] != quiet[i]],
        cancelled=len(turns),
        taken=sum(turns),
        left_over=num_held,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = str(write_checkpoint(Path(path), max_position_embeddings=1000))
        for seed in range(args.rounds):
            print(seed, compared(folder, clients=args.clients, seed=seed), flush=True)


if __name__ == "__main__":
    main()
