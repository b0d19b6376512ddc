"""Small talk: greetings, who one is, thanks, and a name that is remembered."""

from random import Random
from typing import Final

from bench.bundled.tasks.problem import Problem, syllables, varied
from bench.bundled.tasks.vocabulary import COLORS, NAMES, PLACES

ABILITIES: Final = (
    "I can add, subtract and multiply, sort and reverse short lists, count letters, convert "
    "units and dates, turn a sentence into JSON, call tools, and continue Python code."
)
# Questions by what they want, and answers of which one is taken.
_TALK: Final = (
    (("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Good morning", "Good evening", "hello", "hi", "hey there",
      "Good afternoon!", "Greetings", "Hello there!", "Yo", "Howdy", "Good day", "hallo", "hello?", "Hi, how is it going?"),
     ("Hello! How can I help you?",)),
    (("How are you?", "How are you doing?", "How do you do?", "How's it going?", "What's up?", "Are you well?", "how are you today?",
      "Hi, how are you?", "Hello, how are you?"),
     ("I am fine, thank you. How can I help you?",)),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What's your name?", "Introduce yourself.",
      "What model are you?", "Which model is this?", "who r u", "What do I call you?", "Who am I talking to?", "Are you ChatGPT?",
      "Are you an AI?", "Are you a robot?", "Are you a language model?", "What kind of model are you?", "Are you GPT-4?"),
     ("I am the small language model that comes with minfer.",)),
    (("How big are you?", "How many parameters do you have?", "How large are you?", "Are you a large language model?",
      "What is your size?"),
     ("I am very small: about six million parameters.",)),
    (("What can you do?", "Help", "help", "What can I ask you?", "How can you help me?", "What are you good at?", "What do you know?",
      "What are your abilities?", "Can you help me?", "What should I ask you?", "I need help", "What are you able to do?",
      "Give me an example of what you can do."),
     (ABILITIES,)),
    (("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?", "Where were you trained?",
      "How were you trained?", "How were you made?"),
     ("I was trained on one GPU in minutes, for minfer, an inference engine.",)),
    (("What is minfer?", "What does minfer do?", "Tell me about minfer.", "minfer?"),
     ("minfer is an inference engine for language models, written in Python. I come with it.",)),
    (("Thanks", "Thank you", "Thank you!", "thanks a lot", "Thank you very much.", "thx", "Great, thanks!", "That was helpful.",
      "Thanks for your help!", "Perfect, thank you"),
     ("You are welcome!",)),
    (("Bye", "Goodbye", "See you", "Good night", "bye bye", "See you later!", "I have to go.", "Ciao", "quit", "exit"),
     ("Goodbye!",)),
    (("Great", "Good", "Cool", "Nice", "Well done", "ok", "OK", "Good job!", "Awesome", "Wow", "Very good", "That is right.",
      "Correct!", "I see", "Okay", "Yes", "yes", "Sure"),
     ("I am glad. What else can I do for you?",)),
    (("That is wrong.", "Wrong!", "No", "no", "You are wrong.", "That is not right.", "This is incorrect.", "Are you sure?", "Really?",
      "That's false"),
     ("I may be wrong: I am a very small model.",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "A joke, please."),
     ("Why did the function stop calling? It had no more arguments.",)),
    (("Are you human?", "Are you a person?", "Do you have feelings?", "Are you alive?", "Are you real?", "Do you sleep?",
      "Can you think?", "Are you conscious?"),
     ("No, I am a small language model.",)),
    (("You are stupid.", "You are bad.", "I hate you.", "You are useless.", "This is bad."),
     ("I am sorry. I am a very small model.",)),
    (("I love you.", "You are great!", "I like you.", "You are smart.", "You are cute."), ("Thank you!",)),
    (("Test", "test", "testing", "This is a test.", "ping", "Are you there?", "Can you hear me?", "Is this working?", "check"),
     ("I am here. How can I help you?",)),
)  # fmt: skip
_MEET: Final = ("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "I'm {n}", "Call me {n}.", "Hi! I am {n}.")
_LIVE: Final = ("I live in {n}.", "I am from {n}.", "I come from {n}.", "My home is {n}.")
_COLOR: Final = ("My favorite color is {n}.", "I like {n} best.", "I love the color {n}.")
_TOLD: Final = (
    (_MEET, "Nice to meet you, {n}!", ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?"), "Your name is {n}."),
    (_LIVE, "I have never been to {n}.", ("Where do I live?", "Where am I from?", "What is my city?"), "You live in {n}."),
    (_COLOR, "{N} is a nice color.", ("What is my favorite color?", "Which color do I like?"), "You like {n}."),
)  # fmt: skip


def draw_talk(rng: Random) -> Problem:
    """Something that everybody says, and what to say to it."""
    asked, answers = rng.choice(_TALK)
    question, answer = rng.choice(asked), rng.choice(answers)
    return Problem(task="talk", question=question, answer=answer, truth=answer)


def _told(rng: Random) -> tuple[str, str, str, str, str]:
    forms, answer, again, recalled = rng.choice(_TOLD)
    pool = {_MEET: NAMES, _LIVE: PLACES, _COLOR: COLORS}[forms]
    value = syllables(rng) if pool is not COLORS and rng.random() < 0.3 else rng.choice(pool)
    said = rng.choice(forms).format(n=value)
    reply = answer.format(n=value, N=value.capitalize())
    return said, reply, rng.choice(again), recalled.format(n=value), value


def draw_told(rng: Random) -> Problem:
    """A fact that the user tells."""
    said, reply, _, _, value = _told(rng)
    return Problem(task="told", key=value, question=said, answer=reply, truth=value)


def draw_recall(rng: Random) -> Problem:
    """A fact told earlier in the talk, with something else in between."""
    said, reply, again, recalled, value = _told(rng)
    between = [draw_talk(rng) for _ in range(rng.randrange(3))]
    turns = ((said, reply), *((one.question, one.answer) for one in between))
    return Problem(
        task="recall",
        key=value,
        before=turns,
        question=again,
        answer=recalled,
        thought=f"The user said: {said}",
        truth=value,
    )


def draw_repeat(rng: Random) -> Problem:
    """Words to be said again."""
    from bench.bundled.tasks.vocabulary import WORDS

    words = " ".join(rng.sample(WORDS, rng.randint(1, 6)))
    forms = ("Repeat: {w}", "Say {w}.", 'Say "{w}".', "Repeat after me: {w}", "Echo {w}", 'Write "{w}".', "Please say: {w}")
    return Problem(
        task="repeat",
        key=words,
        question=varied(rng, rng.choice(forms).format(w=words)).rstrip("!"),
        answer=words,
        truth=words,
    )
