"""What neighbours feel of a client that asks for everything, on the virtual clock.

Sixteen streams of one client, one answer after the other, and beside them one of the
attacks of `bench.abuse` that fill the batch. Steps cost what was measured of a 7B on one
H200: so much for a step, more if a request joins, a little for each row and each
newcomer. Nothing here is left to chance: the same figures come on every machine.

`python -m tests.core.crowd` prints the gaps between the tokens of a neighbour, under the
policy as it is and as it was.
"""

from collections.abc import Iterator
from typing import Final

from attrs import define, field, frozen

from minfer.policies.fair_queue import FairQueue
from minfer.policies.fair_seats import FairSeats
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Cancel, Emit
from minfer.records.policy import Policy
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import ArrivalQueue, Simulated, Simulation

COST: Final = CostModel(
    name="7B on one H200",
    decode=((1024, 4.6e-3),),
    mixed=6.6e-3,
    token=2e-5,
    sequence=2e-5,
    chunk=1.7e-4,
    host=2e-4,
)
STREAMS: Final = 16
TOKENS: Final = 512  # of a neighbour's answer
LONG: Final = 1900  # of an attacker's that is not read, or that is left
SEPARATE: Final = 0.001  # seconds between an answer and the next request
PROBE_EVERY: Final = 0.1  # seconds
BEGIN: Final = 0.5  # seconds, at which the attack begins


@frozen
class Attack:
    """What a client does to others."""

    count: int = 0  # samples at once, and again as they end
    tokens: int = LONG
    leaves: bool = False  # with its first token
    clients: int = 1  # under so many names


ATTACKS: Final = {
    "nothing": Attack(),
    "4,096 prompts": Attack(4096, tokens=64),
    "disconnects": Attack(32, leaves=True),
    "500 readers": Attack(500),
}


@define
class Crowd:
    """Neighbours and attackers, of whom each answer is followed by the next request."""

    policy: Policy
    attack: Attack
    coming: ArrivalQueue = field(factory=ArrivalQueue)
    made: int = 0
    last: dict[str, float] = field(factory=dict)  # token of a neighbour
    gaps: list[float] = field(factory=list)  # seconds, while the attack lasts
    firsts: list[float] = field(factory=list)  # seconds, likewise
    requested: dict[str, float] = field(factory=dict)
    joined: int = 0  # attackers' samples that were let in
    left: set[str] = field(factory=set)
    most: int = 0  # seats that the attackers had at once

    def turns(self, seconds: float) -> Iterator[Turn]:
        """Run so long."""
        config = EngineConfig(
            num_blocks=40_000,
            max_num_seqs=256,
            max_num_batched_tokens=1536,
            policy=self.policy,
        )
        first = [(0.0, self.neighbour(number, 0.0)) for number in range(STREAMS)]
        coming = ArrivalQueue(first)
        self.coming = coming
        coming.append((PROBE_EVERY, self.probe(PROBE_EVERY)))
        coming += [(BEGIN, self.attacker(n)) for n in range(self.attack.count)]
        for turn in Simulation(config, Simulated(), COST, coming).turns():
            self.see(turn)
            yield turn
            if turn.transition.state.time > seconds:
                return

    def neighbour(self, number: int, now: float) -> Request:
        """The next request of a stream."""
        self.made += 1
        name = f"n{number}.{self.made}"
        self.requested[name] = now
        return Request(id=name, prompt=(1,) * 8, max_tokens=TOKENS, client="users")

    def probe(self, now: float) -> Request:
        """A short question of the neighbours, now and then: in a control, too, some steps
        are joined.
        """
        self.made += 1
        self.requested[f"p.{self.made}"] = now
        name = f"p.{self.made}"
        return Request(id=name, prompt=(1,) * 8, max_tokens=1, client="users")

    def attacker(self, number: int) -> Request:
        """The next request of an attacker."""
        self.made += 1
        client, most = f"attacker {number % self.attack.clients}", self.attack.tokens
        name = f"a{number}.{self.made}"
        return Request(id=name, prompt=(1,) * 4, max_tokens=most, client=client)

    def see(self, turn: Turn) -> None:
        """Note what neighbours get, and let everybody go on."""
        now = turn.transition.state.time
        for reason in turn.transition.reasons:
            self.joined += isinstance(reason, Admitted) and reason.id[0] == "a"
        for emit in turn.transition.commands:
            if isinstance(emit, Emit):
                self.read(emit, now)
        names = (name for name, _ in turn.transition.state.running.ids)
        self.most = max(self.most, sum(name[0] == "a" for name in names))

    def read(self, emit: Emit, now: float) -> None:
        """What came out, and who asks again."""
        later = now + SEPARATE
        for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
            if name[0] == "n" and tokens:
                since = self.last.get(name)
                if since is not None and now > BEGIN:
                    self.gaps.append(now - since)
                elif since is None and now > BEGIN:
                    self.firsts.append(now - self.requested[name])
                self.last[name] = now
            elif tokens and self.attack.leaves and name not in self.left:
                self.left.add(name)
                self.coming.append((later, Cancel(name)))
        for done in emit.finished:
            if done.id[0] == "p":
                due = self.requested[done.id] + PROBE_EVERY
                self.coming.append((max(due, later), self.probe(max(due, later))))
                continue
            kind, number = done.id[0], int(done.id[1:].split(".")[0])
            again = (
                self.neighbour(number, later) if kind == "n" else self.attacker(number)
            )
            self.coming.append((later, again))


@frozen
class Felt:
    """What neighbours felt, in milliseconds; and what the attackers had."""

    median: float
    p99: float
    longest: float
    first_p99: float
    tokens: int  # of neighbours, while the attack lasted
    joined: int  # samples of attackers let in
    most: int  # seats of attackers


def felt(policy: Policy, attack: Attack, seconds: float = 3.5) -> Felt:
    """An attack under a policy."""
    crowd = Crowd(policy, attack)
    for _ in crowd.turns(seconds):
        pass
    gaps, firsts = sorted(crowd.gaps), sorted(crowd.firsts)

    def at(values: list[float], share: float) -> float:
        return round(1000 * values[int(share * (len(values) - 1))], 2) if values else 0.0

    return Felt(
        median=at(gaps, 0.5),
        p99=at(gaps, 0.99),
        longest=at(gaps, 1.0),
        first_p99=at(firsts, 0.99),
        tokens=len(gaps),
        joined=crowd.joined,
        most=crowd.most,
    )


def main() -> None:
    for name, attack in ATTACKS.items():
        for policy in (FairQueue(), FairSeats()):
            print(f"{name:14} {type(policy).__name__:10} {felt(policy, attack)}")


if __name__ == "__main__":
    main()
