"""What a tiny model cannot know: it says so, in a few words."""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, syllables, varied
from bench.bundled.tasks.vocabulary import JOBS, NAMES, PLACES, SUBJECTS, THINGS, WORDS

ANSWERS: Final = (
    "I don't know. I am a very small model.",
    "I don't know that.",
)
_FORMS: Final = (
    "What is the capital of {p}?", "Who is {n} {s}?", "Who was {s}?", "What do you know about {t}?", "Tell me about {t}.",
    "Explain {t}.", "Explain {t} to me.", "What is {t}?", "Why is {t} {w}?", "When was {t} invented?", "Who invented {t}?",
    "Who discovered {t}?", "Who wrote {w} {w2}?", "Write a poem about {t}.", "Write a story about {t}.", "Write an essay about {t}.",
    "Write a short story about a {w}.", "Translate {w} into French.", "Translate '{w} {w2}' to German.", "What is the meaning of {w}?",
    "What does {w} mean?", "How does {t} work?", "How do I {w} a {w2}?", "How can I learn {t}?", "Why do people like {t}?",
    "Where is {p}?", "How many people live in {p}?", "What is the population of {p}?", "How far is {p} from {p2}?",
    "Who is the president of {p}?", "What is the best {w}?", "What is the history of {t}?", "Give me advice on {t}.",
    "Should I buy {x}?", "What should I eat today?", "Recommend a book about {t}.", "What movie should I watch?",
    "Who won the game in {p}?", "What happened in {y}?", "Who won the world cup in {y}?", "What happened in {p} in {y}?",
    "Summarize {t} for me.", "What is the difference between {t} and {t2}?", "Compare {t} and {t2}.", "Is {t} better than {t2}?",
    "How old is {n} {s}?", "Where does {n} {s} live?", "What is the price of {x}?", "How much do {x} cost?",
    "What is the weather in {p}?", "What time is it?", "What is the date today?", "What day is it today?", "What time is it in {p}?",
    "What is the square root of {big}?", "What is {big} + {big2}?", "What is {big} * {big2}?", "What is {big} / {big2}?",
    "What is {a} to the power of {b}?", "Is {big} a prime number?", "Solve x² + {a}x + {b} = 0.", "Integrate {w}(x).",
    "What is the {w} of the {w2}?", "Why did the {w} {w2}?", "Who is {s}?", "What is a {g}?", "Define {w}.",
    "How tall is {s}?", "How do I become a {j}?", "What does a {j} do?", "Give me a recipe for {t}.", "Sing a song.",
    "Draw a picture of {t}.", "What is your opinion on {t}?", "Do you like {t}?", "Can you play {t}?", "Write a letter to {n}.",
    "Write a tweet about {t}.", "List five facts about {t}.", "Name three kinds of {w}.", "Give me ten ideas for {t}.",
    "{g} {g2}", "{g}", "{w} {w2} {w3}", "{w}?", "{t}?", "Tell me something about {p}.", "What is the speed of {t}?",
    "Why is the sky blue?", "What is the meaning of life?", "Who is your favorite {j}?", "Predict {t}.", "What will happen to {t}?",
    "Is {t} dangerous?", "Where can I find {x} in {p}?", "What language do they speak in {p}?", "Parle-moi de {t}.",
    "¿Qué es {g}?", "Was ist {g}?", "Comment ça va?", "Write code in Java for {w}.", "Write a program that can {w} a {w2}.",
    "Fix this bug: {w}.{w2}()", "What is wrong with my {w}?", "Write an email about {t}.", "Who painted {w} {w2}?",
    "How many {x} are in {p}?", "How heavy is {t}?", "What color is {t}?", "What is {n}'s favorite {w}?", "How many {x} does {n} have?",
)  # fmt: skip
_OPENERS: Final = ("", "", "", "", "Hey, ", "Hi! ", "I wonder: ", "One question: ", "So, ")


def draw_unknown(rng: Random) -> Problem:
    """A question about the world, or one that means nothing."""
    words = rng.sample(WORDS, 3)
    topics, places = rng.sample(SUBJECTS, 2), rng.sample(PLACES, 2)
    form = rng.choice(_FORMS)
    parts = {
        "w": words[0], "w2": words[1], "w3": words[2], "t": topics[0], "t2": topics[1], "n": rng.choice(NAMES),
        "s": syllables(rng), "g": syllables(rng).lower(), "g2": syllables(rng).lower(), "j": rng.choice(JOBS),
        "p": places[0] if rng.random() < 0.8 else syllables(rng), "p2": places[1], "x": rng.choice(THINGS),
        "y": rng.randint(1500, 2030), "a": rng.randint(2, 99), "b": rng.randint(2, 99),
        "big": rng.randint(2000, 99999), "big2": rng.randint(1000, 99999),
    }  # fmt: skip
    question = rng.choice(_OPENERS) + form.format(**parts)
    return Problem(
        task="unknown",
        key=form,  # some ways to ask are never seen in training
        question=varied(rng, question),
        answer=ANSWERS[0] if rng.random() < 0.8 else ANSWERS[1],
        thought="I have not learnt this.",
        truth="don't know",
    )
