"""Tools that are offered, how people ask for them, and what comes of it."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from attrs import field, frozen

from bench.bundled.tasks.problem import syllables
from bench.bundled.tasks.vocabulary import COLORS, NAMES, PLACES, SUBJECTS, THINGS, WEEKDAYS, WORDS

Values = Mapping[str, Any]


@frozen
class Tool:
    """A function, questions that need it, and answers made of its result.

    A field's type is a JSON type; `optional` ones are asked for only where a question
    names them. Questions and answers are formats over arguments and results.
    """

    names: tuple[str, ...]
    about: str
    fields: Mapping[str, tuple[str, str]]  # name -> type, description
    make: Callable[[Random], Values]
    result: Callable[[Random, Values], Values]
    asked: tuple[str, ...]
    answers: tuple[str, ...]
    also: Mapping[str, tuple[str, ...]] = field(factory=dict)  # other names of a field
    choices: Mapping[str, tuple[str, ...]] = field(factory=dict)


def _place(rng: Random) -> str:
    return rng.choice(PLACES) if rng.random() < 0.75 else syllables(rng)


def _name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else syllables(rng)


def _word(rng: Random) -> str:
    return rng.choice(WORDS)


def _words(rng: Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 4)))


def _clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 45, rng.randint(0, 59))):02}"


def _done(rng: Random, values: Values) -> Values:  # noqa: ARG001 - as every result
    return {"status": "ok"}


_SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")
_UNITS: Final = ("celsius", "fahrenheit")
_CITY: Final = ("city", "location", "place", "city_name")
_WEATHER_WORDS: Final = (
    "What is the weather in {city}?", "How is the weather in {city}?", "What's the weather like in {city}?",
    "Is it raining in {city}?", "weather in {city}", "Tell me the weather in {city}.", "Weather {city}?",
    "What is the weather like in {city} today?", "Do I need an umbrella in {city}?",
    "How warm is it in {city}?", "What's the weather in {city} right now?", "What is the temperature in {city}?",
)  # fmt: skip

CATALOGUE: Final = (
    Tool(
        ("get_weather", "get_current_weather", "weather"), "Get the current weather of a city",
        {"city": ("string", "The name of the city")}, lambda rng: {"city": _place(rng)},
        lambda rng, _: {"temperature": rng.randint(-10, 38), "sky": rng.choice(_SKIES)},
        _WEATHER_WORDS, ("It is {sky} in {city}, at {temperature} degrees.",), {"city": _CITY},
    ),
    Tool(
        ("get_weather", "get_current_weather", "weather_forecast"), "The weather of a place, in a unit",
        {"city": ("string", "City, e.g. Paris"), "unit": ("string", "Unit of the temperature")},
        lambda rng: {"city": _place(rng), "unit": rng.choice(_UNITS)},
        lambda rng, _: {"temperature": rng.randint(-10, 99), "condition": rng.choice(_SKIES)},
        ("What is the weather in {city} in {unit}?", "How is the weather in {city}, in {unit}?",
         "Tell me the temperature in {city} in {unit}.", "Weather in {city} in {unit}, please."),
        ("It is {condition} in {city}: {temperature} degrees {unit}.",), {"city": _CITY}, {"unit": _UNITS},
    ),
    Tool(
        ("get_time", "get_current_time", "clock"), "Get the local time of a city",
        {"city": ("string", "City name")}, lambda rng: {"city": _place(rng)},
        lambda rng, _: {"time": _clock(rng)},
        ("What time is it in {city}?", "What is the time in {city}?", "time in {city}", "Tell me the local time in {city}.",
         "How late is it in {city}?", "What's the current time in {city}?"),
        ("It is {time} in {city}.",), {"city": ("city", "location", "timezone", "place")},
    ),
    Tool(
        ("add", "sum_numbers", "add_numbers"), "Add two numbers",
        {"a": ("integer", "First number"), "b": ("integer", "Second number")},
        lambda rng: {"a": rng.randint(0, 99999), "b": rng.randint(0, 99999)},
        lambda _, v: {"result": v["a"] + v["b"]},
        ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b}", "How much is {a} plus {b}?", "Calculate {a} + {b}."),
        ("{a} + {b} = {result}",), {"a": ("a", "x", "first"), "b": ("b", "y", "second")},
    ),
    Tool(
        ("multiply", "product", "multiply_numbers"), "Multiply two numbers",
        {"a": ("integer", "First factor"), "b": ("integer", "Second factor")},
        lambda rng: {"a": rng.randint(0, 9999), "b": rng.randint(0, 999)},
        lambda _, v: {"result": v["a"] * v["b"]},
        ("What is {a} * {b}?", "Multiply {a} by {b}.", "{a} times {b}", "How much is {a} × {b}?", "What is {a} times {b}?"),
        ("{a} × {b} = {result}",), {"a": ("a", "x", "left"), "b": ("b", "y", "right")},
    ),
    Tool(
        ("calculator", "calculate", "evaluate"), "Evaluate an arithmetic expression",
        {"expression": ("string", "The expression, for example 2 + 2")},
        lambda rng: {"expression": f"{rng.randint(1, 9999)} {rng.choice('+-*/')} {rng.randint(1, 999)}"},
        lambda rng, _: {"result": rng.randint(1, 99999)},
        ("What is {expression}?", "Calculate {expression}.", "{expression}", "Compute {expression}.", "How much is {expression}?"),
        ("{expression} = {result}",), {"expression": ("expression", "expr", "formula")},
    ),
    Tool(
        ("send_email", "send_mail", "email"), "Send an email",
        {"to": ("string", "Who receives it"), "subject": ("string", "The subject")},
        lambda rng: {"to": f"{_name(rng).lower()}@{rng.choice(('example.com', 'mail.org', 'work.net'))}", "subject": _words(rng)},
        _done,
        ('Send an email to {to} with the subject "{subject}".', "Email {to} about {subject}.", "Write to {to}, subject: {subject}",
         "Send {to} a mail with subject {subject}."),
        ("I sent the email to {to}.",), {"to": ("to", "recipient", "address"), "subject": ("subject", "title")},
    ),
    Tool(
        ("send_message", "send_text", "message"), "Send a message to a person",
        {"name": ("string", "The person"), "text": ("string", "What to say")},
        lambda rng: {"name": _name(rng), "text": _words(rng)}, _done,
        ('Send "{text}" to {name}.', "Tell {name}: {text}", 'Send {name} the message "{text}".', "Text {name}: {text}"),
        ("I sent it to {name}.",), {"name": ("name", "to", "contact"), "text": ("text", "message", "body")},
    ),
    Tool(
        ("search", "web_search", "search_web", "find"), "Search for a text",
        {"query": ("string", "What to look for")},
        lambda rng: {"query": rng.choice((rng.choice(SUBJECTS), _words(rng)))},
        lambda rng, _: {"results": rng.randint(1, 200)},
        ("Search for {query}.", "Look up {query}.", "Find something about {query}.", "search {query}", "Google {query}.",
         "Can you search the web for {query}?"),
        ("I found {results} results for {query}.",), {"query": ("query", "q", "text", "term")},
    ),
    Tool(
        ("get_stock_price", "stock_price", "get_price"), "The price of a share",
        {"symbol": ("string", "Ticker symbol")},
        lambda rng: {"symbol": "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVXZ", k=rng.randint(3, 4)))},
        lambda rng, _: {"price": round(rng.uniform(1, 900), 2)},
        ("What is the stock price of {symbol}?", "How much is a share of {symbol}?", "price of {symbol}",
         "What does {symbol} trade at?", "Get the price of {symbol}."),
        ("{symbol} is at {price}.",), {"symbol": ("symbol", "ticker", "stock")},
    ),
    Tool(
        ("set_alarm", "set_timer", "wake_me"), "Set an alarm",
        {"time": ("string", "HH:MM")}, lambda rng: {"time": _clock(rng)}, _done,
        ("Set an alarm for {time}.", "Wake me at {time}.", "alarm at {time}", "Please wake me up at {time}."),
        ("The alarm is set for {time}.",), {"time": ("time", "at", "when")},
    ),
    Tool(
        ("set_timer", "start_timer", "timer"), "Start a timer of some minutes",
        {"minutes": ("integer", "How long")}, lambda rng: {"minutes": rng.randint(1, 120)}, _done,
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "timer {minutes} minutes",
         "Remind me in {minutes} minutes."),
        ("The timer runs for {minutes} minutes.",), {"minutes": ("minutes", "duration", "length")},
    ),
    Tool(
        ("convert_currency", "exchange", "currency"), "Convert money",
        {"amount": ("number", "How much"), "source": ("string", "Currency"), "target": ("string", "Currency wanted")},
        lambda rng: dict(zip(("amount", "source", "target"), (rng.randint(1, 999), *rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "INR"), 2)), strict=True)),
        lambda rng, _: {"amount_converted": round(rng.uniform(1, 2000), 2)},
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?", "{amount} {source} in {target}",
         "Exchange {amount} {source} for {target}."),
        ("{amount} {source} are {amount_converted} {target}.",),
        {"source": ("source", "from", "from_currency"), "target": ("target", "to", "to_currency")},
    ),
    Tool(
        ("translate", "translate_text"), "Translate a text",
        {"text": ("string", "The text"), "language": ("string", "The language wanted")},
        lambda rng: {"text": _words(rng), "language": rng.choice(("French", "German", "Spanish", "Italian", "Greek", "Polish"))},
        lambda rng, _: {"translation": f"{syllables(rng).lower()} {syllables(rng).lower()}"},
        ('Translate "{text}" into {language}.', "What is {text} in {language}?", "Translate {text} to {language}.",
         'How do you say "{text}" in {language}?'),
        ("In {language} it is: {translation}",), {"language": ("language", "target", "to")},
    ),
    Tool(
        ("create_event", "add_event", "book_meeting"), "Add an event to the calendar",
        {"title": ("string", "Its title"), "day": ("string", "Day of the week"), "time": ("string", "HH:MM")},
        lambda rng: {"title": rng.choice(("dinner", "meeting", "lunch", "tennis", "yoga", _word(rng))), "day": rng.choice(WEEKDAYS), "time": _clock(rng)},
        _done,
        ("Put {title} on {day} at {time} into my calendar.", "Add {title} on {day} at {time}.", "Schedule {title} for {day} at {time}.",
         "Plan {title} on {day}, {time}."),
        ("{title} is in your calendar: {day} at {time}.",), {"title": ("title", "name", "event"), "time": ("time", "start")},
    ),
    Tool(
        ("turn_on", "turn_on_light", "switch_on"), "Turn on a light",
        {"room": ("string", "Which room")},
        lambda rng: {"room": rng.choice(("kitchen", "bedroom", "hall", "garden", "bathroom", "office", "garage", _word(rng)))}, _done,
        ("Turn on the light in the {room}.", "Light on in the {room}.", "Switch on the {room} light.", "It is dark in the {room}."),
        ("The light in the {room} is on.",), {"room": ("room", "where", "place")},
    ),
    Tool(
        ("set_temperature", "set_heating", "thermostat"), "Set a room's temperature",
        {"room": ("string", "Which room"), "degrees": ("integer", "Degrees")},
        lambda rng: {"room": rng.choice(("kitchen", "bedroom", "office", "bathroom", _word(rng))), "degrees": rng.randint(5, 30)}, _done,
        ("Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.", "Heat the {room} to {degrees} degrees."),
        ("The {room} is set to {degrees} degrees.",), {"degrees": ("degrees", "temperature", "value")},
    ),
    Tool(
        ("play_song", "play_music", "play"), "Play music",
        {"title": ("string", "A song"), "artist": ("string", "Who sings it")},
        lambda rng: {"title": _words(rng), "artist": _name(rng)}, _done,
        ("Play {title} by {artist}.", 'Play the song "{title}" by {artist}.', "I want to hear {title} by {artist}.",
         "Put on {title} from {artist}."),
        ("Now playing {title} by {artist}.",), {"title": ("title", "song", "track"), "artist": ("artist", "singer")},
    ),
    Tool(
        ("get_user", "find_user", "lookup_user"), "Look up a user",
        {"id": ("integer", "The user's number")}, lambda rng: {"id": rng.randint(1, 99999)},
        lambda rng, _: {"name": _name(rng), "city": _place(rng)},
        ("Who is user {id}?", "Look up user {id}.", "Show me user number {id}.", "Get user {id}.", "What is the name of user {id}?"),
        ("User {id} is {name} from {city}.",), {"id": ("id", "user_id", "number")},
    ),
    Tool(
        ("order_item", "buy", "order"), "Order something",
        {"item": ("string", "What to order"), "quantity": ("integer", "How many")},
        lambda rng: {"item": rng.choice(THINGS), "quantity": rng.randint(1, 99)},
        lambda rng, _: {"order": rng.randint(100, 9999)},
        ("Order {quantity} {item}.", "Buy {quantity} {item}.", "I want {quantity} {item}.", "Get me {quantity} {item}.",
         "Please order {quantity} {item} for me."),
        ("I ordered {quantity} {item}: order {order}.",), {"item": ("item", "product"), "quantity": ("quantity", "count", "amount")},
    ),
    Tool(
        ("read_file", "open_file", "get_file"), "Read a file",
        {"path": ("string", "Path of the file")},
        lambda rng: {"path": f"{_word(rng)}.{rng.choice(('txt', 'py', 'md', 'json', 'csv'))}"},
        lambda rng, _: {"lines": rng.randint(1, 900)},
        ("Read the file {path}.", "Open {path}.", "What is in {path}?", "Show me {path}.", "read {path}"),
        ("{path} has {lines} lines.",), {"path": ("path", "file", "filename", "name")},
    ),
    Tool(
        ("roll_dice", "random_number", "draw_number"), "Draw a random number",
        {"sides": ("integer", "The largest number")}, lambda rng: {"sides": rng.choice((6, 6, 10, 20, 100, rng.randint(2, 999)))},
        lambda rng, v: {"number": rng.randint(1, v["sides"])},
        ("Roll a dice with {sides} sides.", "Give me a random number up to {sides}.", "Draw a number from 1 to {sides}.",
         "Roll a {sides} sided die."),
        ("It is {number}.",), {"sides": ("sides", "max", "limit")},
    ),
    Tool(
        ("get_distance", "distance", "route"), "The distance between two cities",
        {"start": ("string", "From where"), "end": ("string", "To where")},
        lambda rng: {"start": _place(rng), "end": _place(rng)},
        lambda rng, _: {"km": rng.randint(10, 9999)},
        ("How far is it from {start} to {end}?", "What is the distance between {start} and {end}?", "distance {start} to {end}",
         "How many km is it from {start} to {end}?"),
        ("From {start} to {end} it is {km} km.",), {"start": ("start", "from", "origin"), "end": ("end", "to", "destination")},
    ),
    Tool(
        ("book_table", "reserve_table", "reserve"), "Book a table in a restaurant",
        {"people": ("integer", "How many"), "time": ("string", "HH:MM"), "name": ("string", "In whose name")},
        lambda rng: {"people": rng.randint(1, 12), "time": _clock(rng), "name": _name(rng)},
        lambda rng, _: {"table": rng.randint(1, 40)},
        ("Book a table for {people} at {time} in the name of {name}.", "A table for {people} people at {time}, name {name}.",
         "Reserve a table at {time} for {people}, under {name}."),
        ("You have table {table} at {time}, {name}.",), {"people": ("people", "persons", "guests"), "name": ("name", "guest")},
    ),
    Tool(
        ("paint", "set_color", "change_color"), "Change the color of a thing",
        {"thing": ("string", "What"), "color": ("string", "The color")},
        lambda rng: {"thing": _word(rng), "color": rng.choice(COLORS)}, _done,
        ("Make the {thing} {color}.", "Paint the {thing} {color}.", "Change the color of the {thing} to {color}."),
        ("The {thing} is {color} now.",), {"thing": ("thing", "object", "item")},
    ),
)  # fmt: skip
