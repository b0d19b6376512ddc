"""Units, dates, times of day and days of the week."""

import calendar
import datetime
from random import Random
from typing import Final

from attrs import frozen

from bench.bundled.tasks.problem import Problem, varied
from bench.bundled.tasks.vocabulary import MONTHS, WEEKDAYS, phrases


@frozen
class Unit:
    """So many of a smaller unit are in one of a larger."""

    large: str
    small: str
    factor: int
    most: int  # of the larger unit, in questions


_UNITS: Final = (
    Unit("km", "m", 1000, 99),
    Unit("kilometers", "meters", 1000, 99),
    Unit("kg", "g", 1000, 99),
    Unit("kilograms", "grams", 1000, 99),
    Unit("m", "cm", 100, 99),
    Unit("meters", "centimeters", 100, 99),
    Unit("cm", "mm", 10, 99),
    Unit("liters", "ml", 1000, 99),
    Unit("hours", "minutes", 60, 48),
    Unit("minutes", "seconds", 60, 60),
    Unit("days", "hours", 24, 40),
    Unit("weeks", "days", 7, 60),
    Unit("years", "months", 12, 50),
    Unit("feet", "inches", 12, 50),
    Unit("dozen", "pieces", 12, 30),
    Unit("euros", "cents", 100, 99),
    Unit("dollars", "cents", 100, 99),
    Unit("centuries", "years", 100, 30),
    Unit("tons", "kg", 1000, 60),
    Unit("yards", "feet", 3, 99),
)
_INTO: Final = phrases("conversions", "into")
_OF_DEGREES: Final = _INTO[:5:2] + _INTO[3:4]
_DATES: Final = phrases("conversions", "dates")
_AFTER: Final = phrases("conversions", "after")
_DURATION: Final = phrases("conversions", "duration")
_DAY_AFTER: Final = phrases("conversions", "day_after")
_DAY_BEFORE: Final = phrases("conversions", "day_before")


def draw_units(rng: Random) -> Problem:
    """So many kilometers, hours, feet ... in a smaller or a larger unit."""
    unit = rng.choice(_UNITS)
    n = rng.randint(1, unit.most)
    if rng.random() < 0.65:
        given, other, count, found = unit.large, unit.small, n, n * unit.factor
        how = f"{n} × {unit.factor} = {found}"
    else:
        given, other, count, found = unit.small, unit.large, n * unit.factor, n
        how = f"{count} / {unit.factor} = {found}"
    return Problem(
        task="units",
        key=f"{count} {given} {other}",
        question=varied(rng, rng.choice(_INTO).format(n=count, a=given, b=other)),
        answer=f"{count} {given} = {found} {other}",
        thought=f"1 {unit.large} is {unit.factor} {unit.small}: {how}.",
        truth=f"{found} {other}",
    )


def draw_duration(rng: Random) -> Problem:
    """Minutes as hours and minutes, seconds as minutes and seconds, hours as seconds."""
    large, small = rng.choice(
        (("hour", "minute"), ("hour", "minute"), ("minute", "second"))
    )
    if rng.random() < 0.15:
        return _in_seconds(rng)
    many, few = rng.randint(1, 9), rng.randint(0, 59)
    total = 60 * many + few
    found = _counted(many, large)
    if few:
        found += f" and {_counted(few, small)}"
    form = rng.choice((*_DURATION, *_INTO[:3]) if few else _DURATION)
    return Problem(
        task="duration",
        key=f"{total} {small}s" if small == "second" else str(total),
        question=varied(rng, form.format(n=total, a=f"{small}s", b=f"{large}s")),
        answer=f"{total} {small}s = {found}",
        thought=f"{many} × 60 = {60 * many}, and {total} - {60 * many} = {few}.",
        truth=found,
    )


def _counted(count: int, of: str) -> str:
    return f"{count} {of}{'s' * (count != 1)}"


def _in_seconds(rng: Random) -> Problem:
    """Hours or days in a unit that is two smaller."""
    large, small, factor, most = rng.choice(
        (("hour", "seconds", 3600, 24), ("day", "minutes", 1440, 14))
    )
    count = rng.randint(1, most)
    unit, found = large if count == 1 else f"{large}s", count * factor
    form = rng.choice(_INTO)
    return Problem(
        task="duration",
        key=f"{count} {unit} {small}",
        question=varied(rng, form.format(n=count, a=unit, b=small)),
        answer=f"{count} {unit} = {found} {small}",
        thought=f"1 {large} is {factor} {small}: {count} × {factor} = {found}.",
        truth=f"{found} {small}",
    )


def draw_temperature(rng: Random) -> Problem:
    """Degrees of one scale in the other, to a tenth of one."""
    if rng.random() < 0.5:
        return _any_temperature(rng)
    celsius = 5 * rng.randint(-8, 40)
    part = celsius * 9 // 5
    warm = part + 32
    given, other = rng.choice(
        (
            ("°C", "°F"),
            ("degrees Celsius", "Fahrenheit"),
            ("Celsius", "Fahrenheit"),
            ("C", "F"),
        )
    )
    sign = "" if other == "°F" else " "
    if rng.random() < 0.6:
        asked, into, n = given, other, celsius
        answer = (
            f"{n} × 9 / 5 + 32 = {part} + 32 = {warm}, so {warm}{sign or ' '}{other}."
        )
        truth = f"{warm} {other}"
    else:
        asked, into, n = other, given, warm
        answer = f"({n} - 32) × 5 / 9 = {part} × 5 / 9 = {celsius}, so {celsius} {given}."
        truth = f"{celsius} {given}"
    return Problem(
        task="temperature",
        question=varied(rng, rng.choice(_OF_DEGREES).format(n=n, a=asked, b=into)),
        answer=answer,
        thought=f"{answer.split(',')[0]}.",
        truth=truth,
    )


def _any_temperature(rng: Random) -> Problem:
    """Whole degrees, of which the other scale has tenths."""
    given, other = rng.choice((("Celsius", "Fahrenheit"), ("Fahrenheit", "Celsius")))
    if given == "Celsius":
        n = rng.randint(-20, 50)
        found = _tenths(n * 9 / 5 + 32)
        working = f"{n} × 9 / 5 + 32 = {_tenths(n * 9 / 5)} + 32 = {found}"
    else:
        n = rng.randint(0, 120)
        found = _tenths((n - 32) * 5 / 9)
        working = f"({n} - 32) × 5 / 9 = {n - 32} × 5 / 9 = {found}"
    unit = rng.choice(("degrees {}", "{}", "{}")).format(given)
    return Problem(
        task="temperature",
        question=varied(rng, rng.choice(_OF_DEGREES).format(n=n, a=unit, b=other)),
        answer=f"{working}, so {found} {other}.",
        thought=f"{working}.",
        truth=f"{found} {other}",
    )


def _tenths(value: float) -> str:
    return f"{round(value, 1) + 0.0:g}"


def _suffix(day: int) -> str:
    last = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{last}"


def _written(date: datetime.date) -> dict[str, str]:
    """A date in the formats that questions name."""
    month = MONTHS[date.month - 1]
    return {
        "YYYY-MM-DD": date.isoformat(),
        "ISO": date.isoformat(),
        "DD/MM/YYYY": date.strftime("%d/%m/%Y"),
        "MM/DD/YYYY": date.strftime("%m/%d/%Y"),
        "DD.MM.YYYY": date.strftime("%d.%m.%Y"),
        "day month year": f"{date.day} {month} {date.year}",
    }


def draw_date(rng: Random) -> Problem:
    """A date in another format."""
    date = datetime.date(rng.randint(1900, 2099), 1, 1) + datetime.timedelta(
        rng.randrange(365)
    )
    forms = _written(date)
    month = MONTHS[date.month - 1]
    given = rng.choice(
        (
            forms["ISO"],
            forms["day month year"],
            f"{month} {date.day}, {date.year}",
            f"{month} {_suffix(date.day)}, {date.year}",
        )
    )
    wanted = rng.choice([name for name, text in forms.items() if text != given])
    return Problem(
        task="date",
        key=date.isoformat(),
        question=varied(rng, rng.choice(_DATES).format(d=given, f=wanted)),
        answer=forms[wanted],
        thought=f"The day is {date.day}, the month is {month}, number {date.month}, "
        f"the year is {date.year}.",
        truth=forms[wanted],
    )


def draw_next_day(rng: Random) -> Problem:
    """The day after or before a date."""
    date = datetime.date(rng.randint(1950, 2060), 1, 1) + datetime.timedelta(
        rng.randrange(365)
    )
    back = rng.random() < 0.3
    if rng.random() < 0.4:  # ends of months are rare otherwise
        month = rng.choice((date.month, 1, 3, 3))
        date = date.replace(month=month, day=1) - datetime.timedelta(0 if back else 1)
    after = date + datetime.timedelta(-1 if back else 1)
    given, found = date.isoformat(), after.isoformat()
    if rng.random() < 0.3:
        given, found = _in_words(date), _in_words(after)
    forms = _DAY_BEFORE if back else _DAY_AFTER
    return Problem(
        task="next date",
        key=date.isoformat(),
        question=varied(rng, rng.choice(forms).format(d=given)),
        answer=found,
        truth=found,
    )


def _in_words(date: datetime.date) -> str:
    return f"{MONTHS[date.month - 1]} {date.day}, {date.year}"


def draw_weekday(rng: Random) -> Problem:
    """Some days after a day of the week."""
    day, n = rng.randrange(7), rng.randint(1, 14)
    found = WEEKDAYS[(day + n) % 7]
    steps = " ".join(WEEKDAYS[(day + i) % 7] for i in range(n % 7 + 1))
    weeks = (
        f"{n} days are {n // 7} week{'s' * (n > 13)} and {n % 7} days. " if n > 6 else ""
    )
    return Problem(
        task="weekday",
        question=varied(rng, rng.choice(_AFTER).format(n=n, d=WEEKDAYS[day])),
        answer=f"{found}.",
        thought=f"{weeks}I count: {steps}.",
        truth=found,
    )


def _days_of(rng: Random, month: int) -> tuple[str, str]:
    """How many days a month of a year has."""
    year = rng.randint(1990, 2040)
    days = calendar.monthrange(year, month + 1)[1]
    form = rng.choice(
        (
            "How many days does {m} {y} have?",
            "How many days are in {m} {y}?",
            "How many days does {m} have in {y}?",
        )
    )
    told = f"{MONTHS[month]} {year} has {days} days."
    if month == 1:
        told += f" {year} is {'a' if days == 29 else 'no'} leap year."
    return form.format(m=MONTHS[month], y=year), told


def draw_calendar(rng: Random) -> Problem:
    """What everybody knows of months and days."""
    month, day = rng.randrange(12), rng.randrange(7)
    days = (
        "31",
        "28, or 29 in a leap year",
        "31",
        "30",
        "31",
        "30",
        "31",
        "31",
        "30",
        "31",
        "30",
        "31",
    )
    facts = (
        (
            f"How many days does {MONTHS[month]} have?",
            f"{MONTHS[month]} has {days[month]} days.",
        ),
        (f"Which month comes after {MONTHS[month]}?", f"{MONTHS[(month + 1) % 12]}."),
        (f"Which month comes before {MONTHS[month]}?", f"{MONTHS[month - 1]}."),
        (f"What is month number {month + 1}?", f"{MONTHS[month]}."),
        _days_of(rng, month),
        _days_of(rng, 1),
        (f"Which weekday comes after {WEEKDAYS[day]}?", f"{WEEKDAYS[(day + 1) % 7]}."),
        (f"Which weekday is before {WEEKDAYS[day]}?", f"{WEEKDAYS[day - 1]}."),
        (f"Which day is before {WEEKDAYS[day]}?", f"{WEEKDAYS[day - 1]}."),
        (f"What day comes after {WEEKDAYS[day]}?", f"{WEEKDAYS[(day + 1) % 7]}."),
        (f"What day comes before {WEEKDAYS[day]}?", f"{WEEKDAYS[day - 1]}."),
        ("How many days are in a week?", "A week has 7 days."),
        ("How many days are in a year?", "A year has 365 days, and a leap year 366."),
        ("How many months are in a year?", "A year has 12 months."),
        ("How many hours are in a day?", "A day has 24 hours."),
        ("How many minutes are in an hour?", "An hour has 60 minutes."),
        ("How many seconds are in a minute?", "A minute has 60 seconds."),
        ("What are the days of the week?", ", ".join(WEEKDAYS) + "."),
        ("List the months of the year.", ", ".join(MONTHS) + "."),
    )
    question, answer = rng.choice(facts)
    return Problem(
        task="calendar", question=varied(rng, question), answer=answer, truth=answer
    )
