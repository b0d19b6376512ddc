"""Required and strict tool calls: the constraint that an answer must match.

    tools, which calls are required --> a grammar in the model's own format

Every protocol has its own fields for the tools (`OfferedTool`) and for the wanted calls
(`CallRequirements`); errors name those. Where nothing has to be enforced, answers are
free.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import attrs
from attrs import frozen

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.protocol import GenerationRequest, ModelInfo, PartConstraint
from minfer.effects.serving.request_parsing.answer_parsing import end_of
from minfer.effects.serving.request_parsing.bodies import invalid_value, short_json
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.structured_fields import (
    Constraint,
    client_field,
)
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import constraint_rule, json_rule
from minfer.effects.text.grammars.schemas import check_schema
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.formats import NONE, Parsing
from minfer.effects.text.tools.forms import (
    FORMS,
    MARKED,
    OBJECT,
    Calling,
    arguments_schema,
    grammar,
    with_reasoning,
)
from minfer.effects.text.tools.text_arguments import TextArgument
from minfer.effects.text.tools.thinking import REASONING
from minfer.sampling.structured import FIELD, MAX_CONSTRAINT, StructuredOutputs

TOOL_CHOICE: Final = "tool_choice"  # the field for the wanted calls, in every protocol
# The end of a prompt within reasoning, in whichever format.
_OPEN_REASONING: Final = re.compile(
    r"([<\[][^<>\[\]/]*(?:think|reason|thought)[^<>\[\]/]*[>\]])\s*\Z", re.IGNORECASE
)
_log: Final = logging.getLogger("minfer.constraints")
_POSITION: Final = re.compile(r"\[[0-9]+\]")
_JSON_KINDS: Final = ("json", "json_object")  # forms that a call cannot be taken for


@frozen(kw_only=True)
class OfferedTool:
    """A tool that is in the prompt."""

    name: str
    parameters: Mapping[str, Any] | None
    field_path: str  # its place in the body, below which its fields are
    schema: str = "parameters"  # the field of its schema
    strict: bool = False  # its arguments must match the schema, whenever it is called
    text: TextArgument | None = None  # its only argument, if that is of a grammar

    @property
    def param(self) -> str:
        """The field of its schema, as errors name it."""
        return f"{self.field_path}.{self.schema}"

    @property
    def hint(self) -> str:
        """The name of `param` for the header of ignored fields: without positions."""
        return _POSITION.sub("", self.param)


def check_names(names: Sequence[str], field: str = "tools") -> None:
    """Raise the error in the tools at `field` with these names, if any."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            message = f"must differ in their names; there are two {short_json(name)}"
            raise invalid_value(message, field)
        seen.add(name)


@frozen(kw_only=True)
class CallRequirements:
    """Which calls are required."""

    required: bool = False  # at least one
    only: frozenset[str] | None = None  # of these tools; None: of all
    parallel: bool = True  # there may be more than one


@frozen
class AnswerConstraint:
    """The constraint of an answer, and the field that requires it."""

    constraint: StructuredOutputs
    field: str
    parts: tuple[PartConstraint, ...]
    # Used if the constraint cannot be compiled: it allows any object as the arguments of
    # tools that are not strict.
    fallback: PartConstraint | None = None


def constrain_calls(
    llm: ModelInfo,
    offers: Sequence[OfferedTool],
    requirements: CallRequirements,
    parsing: Parsing | None,
    answer: Constraint | None = None,
) -> AnswerConstraint | None:
    """The constraint of an answer for its calls; None: no other than the request's own,
    `answer`. Raises ApiError, which names the field that cannot be fulfilled.
    """
    offers = [
        offer
        for offer in offers
        if requirements.only is None or offer.name in requirements.only
    ]
    bounds_text = requirements.required or _separates_calls(parsing, answer)
    offers = [
        _with_text(offer, enforced=bounds_text, must=requirements.required)
        for offer in offers
    ]
    requiring = _requiring_field(offers, requirements)
    if not offers or not (requiring or answer):
        return None
    if requiring and llm.parsers.tools == NONE:
        reason = "cannot be enforced where calls stay text (--tool-call-parser none)"
        raise ApiError(f"{requiring}: {reason}; leave it out", requiring)
    if parsing is None:
        return None
    if requiring and parsing.form not in FORMS:
        reason = f"cannot be had of a model whose calls have the format {parsing.form!r}"
        raise ApiError(f"{requiring}: {reason}", requiring)
    # A requested JSON form is ignored if calls are required; other texts are no form.
    ignored = requirements.required and (
        answer is None or answer.build().kind in _JSON_KINDS
    )
    plain_answer = None if ignored else _plain_answer(answer, parsing.form, requiring)
    if not requiring and plain_answer is None:
        return None
    part_constraints = [_arguments_constraint(offer, requirements) for offer in offers]
    callees = [
        Callee(
            offer.name,
            part_constraint.constraint.json or OBJECT,
            lenient=not (offer.strict or (offer.text and requirements.required)),
            text=offer.text,
        )
        for offer, part_constraint in zip(offers, part_constraints, strict=True)
    ]
    calling = Calling(
        format=parsing.form,
        callees=tuple(callees),
        must=requirements.required,
        several=requirements.parallel,
        thinking=REASONING.get(parsing.reasoning),
        opened=parsing.thinking is not None,
        answer=None if plain_answer is None else _json_rule(plain_answer.constraint),
        token=_marker_ids(llm),
    )
    strict = [
        part_constraint
        for callee, part_constraint in zip(callees, part_constraints, strict=True)
        if not callee.lenient
    ]
    field = requiring or (plain_answer.field if plain_answer is not None else "")
    explaining = (*strict, *([plain_answer] if plain_answer else []))
    hinted_offer = next((offer for offer in offers if offer.text), offers[0])
    return _with_fallback(calling, field, explaining, hinted_offer.hint)


def _with_fallback(
    calling: Calling, field: str, part_constraints: tuple[PartConstraint, ...], hint: str
) -> AnswerConstraint:
    """The constraint of an answer, and a fallback that ignores the schemas and grammars
    of tools that are not strict, if there are any. Raises ApiError if neither is small
    enough.
    """
    free = [
        attrs.evolve(callee, schema=OBJECT, text=None) if callee.lenient else callee
        for callee in calling.callees
    ]
    if free == [*calling.callees]:
        return AnswerConstraint(_grammar(calling), field, part_constraints)
    fallback = _grammar(attrs.evolve(calling, callees=tuple(free)))
    try:
        full_grammar = _grammar(calling)
    except ApiError:  # all schemas together are too large
        note_ignored(hint)
        return AnswerConstraint(fallback, field, part_constraints)
    return AnswerConstraint(
        full_grammar, field, part_constraints, PartConstraint(hint, fallback)
    )


def constrain_after_reasoning(
    llm: ModelInfo,
    prompt: Sequence[int],
    parsing: Parsing | None,
    answer: Constraint | None,
) -> AnswerConstraint | None:
    """The constraint of an answer with the request's own one, `answer`, if the prompt
    ends within reasoning: reasoning is free, and the answer begins behind it. None if the
    answer begins with its first token, or if the constraint itself covers reasoning.
    Raises ApiError.
    """
    if answer is None:
        return None
    if parsing is None or parsing.reasoning == NONE:
        if match := _OPEN_REASONING.search(end_of(llm, prompt)):
            _warn_unknown_reasoning(match[1])
        return None
    constraint = answer.build()
    thinking = parsing.thinking
    if thinking is None or thinking.closes in constraint.text:
        return None
    param = client_field(constraint.param, answer.field)
    try:
        rule_text = constraint_rule(constraint)
    except GrammarError as error:
        reason = str(error).removeprefix(f"{constraint.param}: ")
        raise ApiError(f"{param}: {reason}", param) from None
    text = with_reasoning(
        Calling(
            thinking=thinking,
            opened=True,
            answer=rule_text,
            token=_marker_ids(llm),
        )
    )
    full_constraint = Constraint({"grammar": text}, answer.field).build()
    return AnswerConstraint(
        full_constraint, answer.field, (PartConstraint(param, constraint),)
    )


def _marker_ids(llm: ModelInfo) -> Callable[[str], int | None]:
    """A function from the text of a marker to its token id."""
    return llm.tokenizer.added_token_id if llm.tokenizer else lambda _: None


@cache
def _warn_unknown_reasoning(marker: str) -> None:
    """Warn once that the end of reasoning is unknown."""
    _log.warning(
        "prompts end with %s, which opens reasoning of no format that is known here: "
        "what an answer must look like applies from its first token on; "
        "--reasoning-parser says what the format is",
        marker,
    )


def with_constraint(
    request: GenerationRequest, constraint: AnswerConstraint | None
) -> GenerationRequest:
    """A request with that constraint in addition. Raises ApiError."""
    if constraint is None:
        return request
    if request.beams is not None:
        reason = "does not go with use_beam_search; leave one of them out"
        raise ApiError(f"{constraint.field}: {reason}", constraint.field)
    params = attrs.evolve(request.params, structured_outputs=constraint.constraint)
    return attrs.evolve(
        request,
        params=params,
        constraint_field=constraint.field,
        parts=constraint.parts,
        fallback=constraint.fallback,
    )


def _requiring_field(
    offers: Sequence[OfferedTool], requirements: CallRequirements
) -> str:
    """The field that requires calls, or that they match."""
    if requirements.required or requirements.only is not None:
        return TOOL_CHOICE
    fields = (
        offer.param if offer.text else f"{offer.field_path}.strict"
        for offer in offers
        if offer.strict or offer.text
    )
    return next(fields, "")


def _separates_calls(parsing: Parsing | None, answer: Constraint | None) -> bool:
    """Whether calls can be distinguished from the rest of an answer that need not have
    any.
    """
    marked = parsing is not None and parsing.tools in MARKED
    return marked and (answer is None or answer.build().kind in _JSON_KINDS)


def _with_text(offer: OfferedTool, *, enforced: bool, must: bool) -> OfferedTool:
    """A tool whose text is left free if its grammar need not be enforced, and cannot be.
    Raises ApiError for one that has to be.
    """
    if offer.text is None:
        return offer
    try:
        if enforced:
            offer.text.grammar.check()
            return offer
    except GrammarError as error:
        if must:
            param = f"{offer.param}.definition"
            raise ApiError(f"{param}: {error}", param) from None
    note_ignored(offer.hint)
    return attrs.evolve(offer, text=None)


def _grammar(calling: Calling) -> StructuredOutputs:
    try:
        values = {"grammar": grammar(calling)}
    except GrammarError as error:
        raise ApiError(f"tools: {error}", "tools") from None
    return Constraint(values, "tools").build()


def _arguments_constraint(
    offer: OfferedTool, requirements: CallRequirements
) -> PartConstraint:
    """The constraint of a tool's arguments: its schema or its text's grammar, if that is
    enforced. Raises ApiError for a strict schema that cannot be.
    """
    if offer.text is not None:
        param = f"{offer.param}.definition"
        form = offer.text.escaped(0, '"', '"')
        text = "\n".join([f"start: {form.body}", *form.rules])
        return PartConstraint(param, Constraint({"grammar": text}, param).build())
    schema = OBJECT
    if offer.strict:
        try:
            schema = arguments_schema(offer.parameters, offer.param)
        except GrammarError as error:
            raise ApiError(str(error), offer.param) from None
    elif requirements.required:
        schema = _enforced_part(offer)
    return PartConstraint(offer.param, Constraint({"json": schema}, offer.param).build())


def _enforced_part(offer: OfferedTool) -> str:
    """What can be enforced of the schema of a tool that is not strict."""
    for lenient in (False, True):
        try:
            schema = arguments_schema(offer.parameters, offer.param, lenient=lenient)
        except GrammarError:
            note_ignored(offer.hint)
            continue
        if len(schema) <= MAX_CONSTRAINT:
            return schema
    note_ignored(offer.hint)
    return OBJECT


def _plain_answer(
    answer: Constraint | None, form: str, requiring: str
) -> PartConstraint | None:
    """The constraint of an answer without calls, if it can be distinguished from one with
    calls. If not, it is refused where the field `requiring` requires something of calls.
    """
    if answer is None:
        return None
    constraint = answer.build()
    param = client_field(constraint.param, answer.field)
    if form not in MARKED or constraint.kind not in _JSON_KINDS:
        if requiring:
            reason = f"cannot be combined with {requiring}; leave one of them out"
            raise ApiError(f"{param}: {reason}", param)
        return None
    try:
        check_schema(constraint.json or OBJECT, param)
    except GrammarError as error:
        raise ApiError(str(error), param) from None
    return PartConstraint(param, constraint)


def _json_rule(constraint: StructuredOutputs) -> str:
    whitespace = not constraint.disable_any_whitespace
    return json_rule(
        check_schema(constraint.json or OBJECT, FIELD), whitespace=whitespace
    )
