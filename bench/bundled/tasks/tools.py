"""One of the tools that are offered is called, and its result becomes an answer.

Half of the tools are of a catalogue; the others are made up, with names and fields that
nobody has seen, so that the description is read and not remembered.
"""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from attrs import evolve, frozen

from bench.bundled.tasks.catalogue import CATALOGUE, Tool
from bench.bundled.tasks.problem import Call, Problem, syllables
from bench.bundled.tasks.vocabulary import NAMES, WORDS, phrases

MOST_OFFERED: Final = 4
SAID: Final = 0.15  # of all calls, those whose result is a sentence, which is passed on
HAS_SPARE: Final = 0.25  # of all tools, those with a field that need not be said
_SPARE: Final[Sequence[tuple[str, Mapping[str, Any]]]] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("units", {"type": "string", "enum": ["metric", "imperial"]}),
    ("format", {"type": "string", "description": "How it is written"}),
    ("language", {"type": "string", "description": "Language of the answer"}),
    ("limit", {"type": "integer", "description": "At most so many"}),
    ("verbose", {"type": "boolean", "description": "Say more"}),
    ("country", {"type": "string", "description": "Country code"}),
)
_COUNTING: Final = frozenset(
    name
    for tool in CATALOGUE
    if tool.names[0] in {"add", "multiply", "calculator"}
    for name in tool.names
)
_ACTS: Final = frozenset({"turn_on", "play_song", "paint", "roll_dice", "order_item"})
_VERBS: Final = phrases("tools", "verbs")
_MADE_UP: Final = phrases("tools", "made_up")


@frozen
class Offer:
    """A tool under the names that it has this time."""

    tool: Tool
    name: str
    fields: Mapping[str, str]  # as the catalogue has it -> as offered
    spare: Mapping[str, Any]  # that need not be said, and is not

    @classmethod
    def of(cls, rng: Random, tool: Tool) -> "Offer":
        """One of a tool's names, and of its fields'."""
        fields = {name: rng.choice(tool.also.get(name, (name,))) for name in tool.fields}
        spare = dict(rng.sample(_SPARE, 1)) if rng.random() < HAS_SPARE else {}
        if spare.keys() & {*fields.values()}:
            spare = {}
        return cls(tool, rng.choice(tool.names), fields, spare)

    def described(self) -> dict[str, Any]:
        """As a request has it."""
        properties = dict[str, dict[str, Any]]()
        for name, (kind, about) in self.tool.fields.items():
            properties[self.fields[name]] = {"type": kind, "description": about}
            if name in self.tool.choices:
                properties[self.fields[name]]["enum"] = list(self.tool.choices[name])
        parameters = {
            "type": "object",
            "properties": properties | dict(self.spare),
            "required": list(properties),
        }
        function = {
            "name": self.name,
            "description": self.tool.about,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def call(self, values: Mapping[str, Any], result: Mapping[str, Any]) -> Call:
        """A call with these values."""
        return Call(
            self.name,
            {self.fields[name]: value for name, value in values.items()},
            result,
        )


def _value(rng: Random, kind: str) -> Any:
    if kind == "integer":
        return rng.randint(0, rng.choice((9, 99, 9999)))
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice((rng.choice(WORDS), rng.choice(NAMES), syllables(rng)))


def made_up(rng: Random) -> Tool:
    """A tool that there is not."""
    verb, noun = rng.choice(_VERBS), rng.choice(WORDS)
    fields = {
        name: (rng.choice(("string", "string", "integer", "boolean")), f"The {name}")
        for name in rng.sample(WORDS, rng.randint(1, 3))
    }
    given = rng.choice((", ", " and ")).join(f"{name} {{{name}}}" for name in fields)
    form = rng.choice(_MADE_UP).replace("{given}", given)
    asked = (
        form.replace("{verb}", verb)
        .replace("{Verb}", verb.capitalize())
        .replace("{noun}", noun)
    )
    return Tool(
        names=(f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}"),
        about=f"{verb.capitalize()} the {noun}",
        fields=fields,
        make=lambda rng: {name: _value(rng, kind) for name, (kind, _) in fields.items()},
        result=lambda rng, _: (
            {"status": "ok"} if rng.random() < 0.5 else {noun: rng.randint(1, 999)}
        ),
        asked=(asked,),
        answers=("",),
    )


def _answer(
    rng: Random, tool: Tool, shown: Mapping[str, Any], result: Mapping[str, Any]
) -> str:
    form = rng.choice(tool.answers)
    if form:
        return form.format(**shown, **result)
    if "status" in result:
        return "Done."
    return " ".join(f"The {name} is {value}." for name, value in result.items())


def _spoken(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a question has them."""
    return {
        name: str(v).lower() if isinstance(v, bool) else v for name, v in values.items()
    }


def _offers(rng: Random, chosen: Offer) -> Sequence[Mapping[str, Any]]:
    """The tool that is needed, among others."""
    offers = [chosen]
    for _ in range(rng.randrange(MOST_OFFERED)):
        other = Offer.of(
            rng, rng.choice(CATALOGUE) if rng.random() < 0.6 else made_up(rng)
        )
        taken = any(
            other.name == one.name or other.tool.about == one.tool.about for one in offers
        )
        if (
            not taken
            and not set(other.tool.asked) & set(chosen.tool.asked)
            and not alike(other.tool, chosen.tool)
        ):
            offers.append(other)
    rng.shuffle(offers)
    return [offer.described() for offer in offers]


def alike(one: Tool, other: Tool) -> bool:
    """Whether two tools would both do for some question."""
    kinds = (
        {"add", "multiply", "calculator"},
        {"get_weather"},
        {"send_email", "send_message"},
        {"set_alarm", "set_timer", "create_event"},
        {"set_temperature", "get_weather"},
        {"search", "translate", "get_stock_price"},
    )
    return any(one.names[0] in kind and other.names[0] in kind for kind in kinds)


def _needed(calls: Sequence[Call]) -> str:
    """What a right answer calls, as JSON."""
    return json.dumps([{"name": c.name, "arguments": dict(c.arguments)} for c in calls])


def draw_call(rng: Random) -> Problem:
    """A question for which a tool is called, once or for two things."""
    offer = Offer.of(rng, rng.choice(CATALOGUE) if rng.random() < 0.6 else made_up(rng))
    tool = offer.tool
    values = tool.make(rng)
    asked = rng.choice(tool.asked)
    question = asked.format(**_spoken(values))
    result = tool.result(rng, values)
    calls, answer = [offer.call(values, result)], _answer(rng, tool, values, result)
    city = "city" in tool.fields and len(tool.fields) == 1
    if city and asked.endswith("?") and rng.random() < 0.4:
        other = tool.make(rng)
        more = tool.result(rng, other)
        question = asked.format(city=f"{values['city']} and {other['city']}")
        calls.append(offer.call(other, more))
        answer += " " + _answer(rng, tool, other, more)
    elif rng.random() < SAID:
        calls = [evolve(calls[0], result=answer)]
    return Problem(
        task="tool call",
        key=f"{offer.name} {' '.join(map(str, values.values()))}",
        question=question,
        answer=answer,
        thought=f"The tool {offer.name} does this.",
        truth=_needed(calls),
        tools=_offers(rng, offer),
        calls=calls,
    )


NO_TOOL: Final = "I have no tool for that."


def draw_missing(rng: Random) -> Problem:
    """A question for which a tool is needed that is not among those that are offered."""
    problem = draw_call(rng)
    while problem.calls[0].name in _COUNTING:  # a sum needs no tool
        problem = draw_call(rng)
    own = {call.name for call in problem.calls}
    left = [tool for tool in problem.tools if tool["function"]["name"] not in own]
    return evolve(
        problem,
        task="missing tool",
        answer=NO_TOOL,
        thought="No tool that I have does this.",
        truth=NO_TOOL,
        tools=left or [Offer.of(rng, made_up(rng)).described()],
        calls=(),
    )


def strange(rng: Random) -> Sequence[Mapping[str, Any]]:
    """Some tools that answer no question."""
    acts = [tool for tool in CATALOGUE if tool.names[0] in _ACTS]
    some = [*rng.sample(acts, rng.randint(0, 2)), made_up(rng)]
    return [Offer.of(rng, tool).described() for tool in some]


def offered(rng: Random) -> Sequence[Mapping[str, Any]]:
    """Some tools, for questions that need none of them."""
    safe = [
        tool
        for tool in CATALOGUE
        if tool.names[0] not in {"add", "multiply", "calculator", "search", "translate"}
    ]
    chosen = Offer.of(rng, rng.choice(safe))
    extra = [Offer.of(rng, made_up(rng)).described()] if rng.random() < 0.4 else []
    return [chosen.described(), *extra]
