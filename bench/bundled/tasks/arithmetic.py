"""Sums, differences, products with their working, quotients, and small stories."""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, varied
from bench.bundled.tasks.vocabulary import NAMES, THINGS, phrases

MOST: Final = 999  # of what is added, subtracted or compared
TABLE: Final = 12  # products of factors up to here are learnt by heart

_SUM: Final = phrases("arithmetic", "sum")
_DIFFERENCE: Final = phrases("arithmetic", "difference")
_PRODUCT: Final = phrases("arithmetic", "product")
_QUOTIENT: Final = phrases("arithmetic", "quotient")
_GAIN: Final = phrases("arithmetic", "gain")
_LOSS: Final = phrases("arithmetic", "loss")
_BOTH: Final = phrases("arithmetic", "both")
_SEQUENCE: Final = phrases("arithmetic", "sequence")


def _number(rng: Random, most: int) -> int:
    """Numbers of one, two and three digits, each often enough."""
    return rng.randint(0, min(most, rng.choice((9, 20, 99, 99, 999, 999, 999))))


def column_sum(a: int, b: int) -> str:
    """A sum from the last digit on, as on paper."""
    steps, carry = [], 0
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(f"{a:0{width}}"[::-1], f"{b:0{width}}"[::-1], strict=True):
        terms = f"{x} + {y} + 1" if carry else f"{x} + {y}"
        total = int(x) + int(y) + carry
        carry = total // 10
        steps.append(f"{terms} = {total}" + (", carry 1" if carry else ""))
    return "; ".join(steps) + "."


def column_difference(a: int, b: int) -> str:
    """A difference that is not negative, from the last digit on."""
    steps, borrow = [], 0
    width = len(str(a))
    for x, y in zip(str(a)[::-1], f"{b:0{width}}"[::-1], strict=True):
        less = int(x) - borrow
        own = f"{x} - 1" if borrow else x
        borrow = int(less < int(y))
        own = f"1{own}" if borrow and own == x else f"{own} + 10" if borrow else own
        steps.append(
            f"{own} - {y} = {less + 10 * borrow - int(y)}" + ", borrow 1" * borrow
        )
    return "; ".join(steps) + "."


def draw_sum(rng: Random) -> Problem:
    """A sum of two numbers up to 999."""
    a = _number(rng, MOST)
    b = _number(rng, MOST if rng.random() < 0.5 else MOST - a)
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    return Problem(
        task="sum",
        key=f"{min(a, b)} {max(a, b)}",
        question=varied(rng, rng.choice(_SUM).format(a=a, b=b)),
        answer=f"{a} + {b} = {a + b}",
        thought=column_sum(a, b),
        truth=str(a + b),
    )


def draw_difference(rng: Random) -> Problem:
    """A difference of numbers up to 999, sometimes below zero."""
    a, b = _number(rng, MOST), _number(rng, MOST)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    forms = _DIFFERENCE  # what two numbers differ by is not below zero
    if a < b:
        forms = tuple(form for form in _DIFFERENCE if "difference" not in form)
    turned = f"{a} is less than {b}: it is minus what {b} - {a} is. " if a < b else ""
    return Problem(
        task="difference",
        key=f"{a} {b}",
        question=varied(rng, rng.choice(forms).format(a=a, b=b)),
        answer=f"{a} - {b} = {a - b}",
        thought=turned + column_difference(max(a, b), min(a, b)),
        truth=str(a - b),
    )


def draw_chain(rng: Random) -> Problem:
    """Three or four numbers to be added or subtracted, one after the other."""
    numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 3, 4)))]
    total, steps, asked = numbers[0], list[str](), str(numbers[0])
    mixed = rng.random() < 0.4
    for number in numbers[1:]:
        less = mixed and total >= number and rng.random() < 0.6
        sign, after = ("-", total - number) if less else ("+", total + number)
        steps.append(f"{total} {sign} {number} = {after}")
        asked, total = f"{asked} {sign} {number}", after
    listed = ", ".join(map(str, numbers))
    forms: tuple[str, ...] = (
        f"What is {asked}?",
        asked,
        f"Calculate {asked}.",
        f"{asked} =",
        f"How much is {asked}?",
    )
    if "-" not in asked:
        forms += (f"What is the sum of {listed}?", f"Sum: {listed}", f"Add {listed}.")
        forms += (f"Add up {listed}.",)
    return Problem(
        task="chain",
        key=" ".join(map(str, sorted(numbers))),
        question=varied(rng, rng.choice(forms)),
        answer=", ".join(steps),
        thought=f"I take one number after the other: {', '.join(steps)}.",
        truth=str(total),
    )


def working(a: int, b: int) -> str:
    """A product, taken apart by the tens of its second factor."""
    if (a <= TABLE and b <= TABLE) or b < 10 or b % 10 == 0:
        return f"{a} × {b} = {a * b}"
    tens, ones = b // 10 * 10, b % 10
    parts = f"{a} × {tens} + {a} × {ones} = {a * tens} + {a * ones}"
    return f"{a} × {b} = {parts} = {a * b}"


def draw_product(rng: Random) -> Problem:
    """A product of numbers below 100."""
    most = rng.choice((TABLE, 20, 99, 99, 99))
    a, b = rng.randint(0, most), rng.randint(0, most)
    if rng.random() < 0.2:
        b = rng.choice((10, 100, rng.randint(2, 9)))
    known = max(a, b) <= TABLE or b in {10, 100}
    return Problem(
        task="product",
        key="" if known else f"{min(a, b)} {max(a, b)}",
        question=varied(rng, rng.choice(_PRODUCT).format(a=a, b=b)),
        answer=working(a, b),
        thought=f"{working(a, b)}.",
        truth=str(a * b),
    )


def division(a: int, b: int) -> str:
    """A quotient of two digits, from the first digit on, as on paper."""
    tens, first = divmod(a // 10, b)
    ones, rest = divmod(10 * first + a % 10, b)
    steps = f"{a // 10} / {b} = {tens}, rest {first}; "
    return steps + f"{10 * first + a % 10} / {b} = {ones}, rest {rest}"


def draw_quotient(rng: Random) -> Problem:
    """A number divided by one up to 12, often with a remainder."""
    b, whole = rng.randint(1, TABLE), rng.randint(0, rng.choice((12, 12, 99)))
    rest = rng.randint(1, b - 1) if b > 1 and rng.random() < 0.45 else 0
    a = b * whole + rest
    left = f" remainder {rest}" if rest else ""
    back = f"{whole} × {b} = {whole * b}" + (f", and {rest} is left" if rest else "")
    known = whole <= TABLE
    by_digits = "" if known else f": {division(a, b)}, so {a} / {b}"
    return Problem(
        task="quotient",
        key="" if known and not rest else f"{a} {b}",
        question=varied(rng, rng.choice(_QUOTIENT).format(a=a, b=b)),
        answer=f"{a} / {b}{by_digits} = {whole}{left}",
        thought=f"{back if known else division(a, b)}.",
        truth=f"{whole}{left}",
    )


def draw_story(rng: Random) -> Problem:
    """A sum or a difference, or one after the other, told."""
    if rng.random() < 0.3:
        return _long_story(rng)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, rng.choice((20, 99, 500))), rng.randint(2, rng.choice((20, 99)))
    more = rng.random() < 0.5
    if not more:
        a, b = max(a, b), min(a, b)
    total = a + b if more else a - b
    told = rng.choice(_GAIN if more else _LOSS).format(n=name, t=thing, a=a, b=b)
    sign = "+" if more else "-"
    how = "more, so I add" if more else "fewer, so I subtract"
    return Problem(
        task="story",
        key=f"{a} {sign} {b} {thing}",
        question=told,
        answer=f"{a} {sign} {b} = {total}, so {total} {thing}.",
        thought=f"They become {how}: {a} {sign} {b} = {total}.",
        truth=str(total),
    )


def _long_story(rng: Random) -> Problem:
    """Something is given away, and something is got, in either order."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(2, 60), rng.randint(1, 40), rng.randint(1, 40)
    a, b = max(a, b), min(a, b)
    middle, total = a - b, a - b + c
    first, second = f"{a} - {b} = {middle}", f"{middle} + {c} = {total}"
    form = rng.choice(_BOTH)
    if form.index("{b}") > form.index("{c}"):
        first, second = f"{a} + {c} = {a + c}", f"{a + c} - {b} = {total}"
    return Problem(
        task="story",
        key=f"{a} - {b} + {c} {thing}",
        question=form.format(n=name, t=thing, a=a, b=b, c=c),
        answer=f"{first}, {second}, so {total} {thing}.",
        thought=f"One after the other: {first}, {second}.",
        truth=str(total),
    )


def draw_sequence(rng: Random) -> Problem:
    """The next number of a row that rises, falls or doubles evenly."""
    start, step = rng.randint(0, rng.choice((9, 20, 99))), rng.randint(1, 12)
    count = rng.choice((3, 4, 4, 5))
    match rng.randrange(5):
        case 0:
            start = rng.randint(1, 9)
            numbers = [start * 2**i for i in range(count + 1)]
            how = "Each number is twice the one before"
        case 1:
            numbers = [start + step * (count - i) for i in range(count + 1)]
            how = f"The numbers fall by {step}"
        case _:
            numbers = [start + step * i for i in range(count + 1)]
            how = f"The numbers rise by {step}"
    *told, last = map(str, numbers)
    return Problem(
        task="sequence",
        key=" ".join(told[:3]),
        question=varied(rng, rng.choice(_SEQUENCE).format(x=", ".join(told))),
        answer=f"{how}, so the next one is {last}.",
        thought=f"{how}.",
        truth=last,
    )


def draw_next(rng: Random) -> Problem:
    """A sum, and then one more step with what came out."""
    first = draw_sum(rng)
    while first.held_out:
        first = draw_sum(rng)
    start, step = int(first.truth), rng.randint(1, 99)
    more = start < step or (start + step <= MOST and rng.random() < 0.5)
    sign, total = ("+", start + step) if more else ("-", start - step)
    forms: tuple[str, ...] = (
        "And plus {b}?",
        "Add {b} to that.",
        "Plus {b}?",
        "Now add {b}.",
        "+ {b}",
    )
    if not more:
        forms = (
            "And minus {b}?",
            "Subtract {b}.",
            "Minus {b}?",
            "Now take away {b}.",
            "- {b}",
        )
    return Problem(
        task="next",
        key=f"{start} {sign} {step}",
        before=((first.question, first.answer),),
        question=rng.choice(forms).format(b=step),
        answer=f"{start} {sign} {step} = {total}",
        thought=f"It was {start}: {start} {sign} {step} = {total}.",
        truth=str(total),
    )


def draw_compare(rng: Random) -> Problem:
    """Which of two numbers is larger, whether one is, or whether it is even."""
    a, b = _number(rng, MOST), _number(rng, MOST)
    if a == b:
        b = a + 1
    larger, smaller = max(a, b), min(a, b)
    forms: tuple[str, ...]
    match rng.randrange(5):
        case 0:
            forms = (
                "Which is larger, {a} or {b}?",
                "Is {a} or {b} larger?",
                "Which is bigger: {a} or {b}?",
                "Which number is greater, {a} or {b}?",
            )
            answer = f"{larger} is larger than {smaller}."
        case 1:
            forms = (
                "Which is smaller, {a} or {b}?",
                "Is {a} or {b} smaller?",
                "Which number is less, {a} or {b}?",
            )
            answer = f"{smaller} is smaller than {larger}."
        case 2:
            forms = (
                "Is {a} bigger than {b}?",
                "Is {a} larger than {b}?",
                "Is {a} greater than {b}?",
                "Is {a} more than {b}?",
                "Is {a} > {b}?",
            )
            said = "Yes" if a > b else "No"
            answer = f"{said}, {larger} is larger than {smaller}."
        case 3:
            forms = (
                "Is {a} smaller than {b}?",
                "Is {a} less than {b}?",
                "Is {a} < {b}?",
            )
            said = "Yes" if a < b else "No"
            answer = f"{said}, {smaller} is smaller than {larger}."
        case _:
            forms = (
                "Is {a} even or odd?",
                "Is {a} odd or even?",
                "Is the number {a} even or odd?",
            )
            answer = f"{a} is {'odd' if a % 2 else 'even'}."
    return Problem(
        task="compare",
        key=f"{a} {b}",
        question=varied(rng, rng.choice(forms).format(a=a, b=b)),
        answer=answer,
        truth=answer,
    )
