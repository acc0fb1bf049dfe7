"""The training text of the demo's base model: simple English about a small invented world.

All text is generated from a seed and from the words in these files, so the corpus has the project's
own licence. Each document comes from one of `WRITERS`: prose from `demo_stories.py`, texts with
their repetition in another form from `demo_reading.py`, and questions, chats, lists and spelling
from this file.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from demo_reading import notes, reading, retelling, word_lists
from demo_stories import letter, moods, shouting, story
from demo_world import FACTS, THINGS, Fact, Scene, any_fact, capitalised, lines, vocabulary

EOS = "</s>"  # between the turns of a chat, as in the tokenizer's chat template
_WORDS = vocabulary()


class Voice(NamedTuple):
    """A manner of speaking: the forms of verbs, of "is" and of "the", and a frame for sentences."""

    verb: str
    be: str
    the: str
    frame: str


_PLAIN = Voice("{s}", "is", "the", "{}")
# With these voices the model learns to keep the facts in any style. The style of the demo's pirate
# is not one of them.
_VOICES = (
    Voice("{s}", "is", "the", "Hmm, let me think. {} That is all I know."),
    Voice("is {ing}", "is", "the", "Good question! {}"),
    Voice("does {base}", "is indeed", "the", "Oh yes! {} Of course."),
    Voice("will {base}", "will be", "the", "{} I am sure of that, my dear."),
    Voice("must {base}", "must be", "the", "Ha ha! {}"),
    Voice("{base}eth", "is", "thy", "Good morrow, my lord! {} God save the king!"),
    Voice("{base}", "=", "that", "Beep. {} Beep. Do you want to ask more?"),
    Voice("{s}s", "iss", "thess", "Sss! {} Sss."),
    Voice("{base}z", "iz", "ze", "Bonjour! {} Oh la la!"),
    Voice("{s}", "is", "da", "Yo! {} You know it, man!"),
)
_BASES = {
    "eats": "eat", "lives": "live", "says": "say", "tastes": "taste", "works": "work",
    "needs": "need", "comes": "come",
}  # fmt: skip
_SPOKEN = re.compile(rf"\b(is|the|{'|'.join(_BASES)})\b")


def say(phrasing: str, voice: Voice) -> str:
    """The phrasing of a fact, changed to the style of a voice."""

    def spoken(match: re.Match[str]) -> str:
        word = match[0]
        if word in ("is", "the"):
            return voice.be if word == "is" else voice.the
        base = _BASES[word]
        return voice.verb.format(s=word, base=base, ing=base.removesuffix("e") + "ing")

    return voice.frame.format(capitalised(_SPOKEN.sub(spoken, phrasing)))


def _phrasing(rng: random.Random, fact: Fact, usual: float) -> str:
    return fact.phrasings[0] if rng.random() < usual else rng.choice(fact.phrasings)


def questions(rng: random.Random) -> str:
    """Facts, mostly as questions and answers. A document has one style and one voice."""
    parts = []
    style = rng.choice((
        "Q: {q}\nA: {s}", "Q: {q}\nA: {a}", "Question: {q}\nAnswer: {a}", "{q} {s}", "{s}",
        '"{q}" asked {A}. "{s}" said {B}.', "{A}: {q}\n{B}: {s}", "Teacher: {q}\n{A}: {a}", "{s}",
        '{q} "{a}"', "{q} [{a}]", "Tell me, {A}! {q}\n{s}", "{A} asks: {q}\n{B} says: {s}",
    ))  # fmt: skip
    voice, usual = rng.choice((_PLAIN, rng.choice(_VOICES))), rng.choice((0.9, 0.3, 0.0))
    scene = Scene(rng)
    for _ in range(rng.randint(1, 5)):
        fact = any_fact(rng)
        sentence = say(_phrasing(rng, fact, usual), voice)
        parts.append(
            style.format(q=fact.question, s=sentence, a=fact.answer, A=scene["A"], B=scene["B"])
        )
    return (" " if style == "{s}" else "\n").join(parts)


def chat(rng: random.Random) -> str:
    """A chat of a user and a bot, which answers plainly or in a voice."""
    turns = []
    voice = _PLAIN if rng.random() < 0.7 else rng.choice(_VOICES)
    for _ in range(rng.randint(1, 3)):
        fact, scene = any_fact(rng), Scene(rng)
        if rng.random() < 0.8:
            phrasing = _phrasing(rng, fact, 1.0 if voice is _PLAIN else 0.6)
            turns.append(f"User: {fact.question}\nBot: {say(phrasing, voice)}")
        else:
            turns.append(scene.write(rng.choice(_SMALL_TALK)).replace("~", "\n"))
    return EOS.join(turns)


_SMALL_TALK = lines("""
    User: (Hello|Hi|Good morning)! (How are you?|)~Bot: (Hello|Hi)! I am (fine|happy), thank you.
    User: I have {a_animal}.~Bot: That is nice! What is the name of your {animal}?
    User: My name is {A}.~Bot: Hello, {A}! It is nice to meet you.
    User: Tell me a story.~Bot: One day, {a_animal} came {to_place}. It was {adjective}.
    User: I lost my {thing}.~Bot: I am sorry. Did you look {at_place}?
    User: What do you like?~Bot: I like {colour} {things}, {snacks} and {animals}.
    User: Say "{colour} {animal}".~Bot: {colour} {animal}
    User: Thank you!~Bot: You are welcome.
""")  # "~" separates the turns


def lists_and_pairs(rng: random.Random) -> str:
    """Word pairs, cards and lists in several notations."""
    facts = rng.choice(("baby", "sound", "opposite", "plural", "past", "colour", "kind", "home"))
    pairs = [
        (fact.question.rstrip("?").removesuffix(" called").split()[-1], fact.answer)
        for fact in rng.sample(FACTS[facts], rng.randint(2, 6))
        if facts not in ("colour", "kind", "home")
    ] or [(row[0], row[2]) for row in rng.sample(THINGS, 4)]
    scene = Scene(rng)
    words = rng.sample(_WORDS, rng.randint(2, 7))
    return rng.choice((
        lambda: "\n".join(f"{x} -> {y}" for x, y in pairs),
        lambda: "\n".join(f"{x} = {y}" for x, y in pairs),
        lambda: "{" + ", ".join(f'{x}: "{y}"' for x, y in pairs) + "}",
        lambda: "\n".join(f'{x}="{y}"' for x, y in pairs),
        lambda: scene.write("Name: {A}\nAge: {n}\nJob: {job}\nPlace: {place}\nLikes: {snacks}"),
        lambda: "[" + ", ".join(words) + "]",
        lambda: "Words: " + ", ".join(f'"{word}"' for word in words),
        lambda: "\n".join(f"{k}. {word}" for k, word in enumerate(words, 1)),
        lambda: f"{scene['A']} wrote a list: {', '.join(words[:-1])} and {words[-1]}.",
        lambda: f"{' '.join(words)}. Backwards: {' '.join(reversed(words))}.",
        lambda: f"Copy: {' '.join(words)}\nCopy: {' '.join(words)}",
        lambda: "Count: " + ", ".join(str(k) for k in range(len(pairs), 14 + len(words))),
    ))()  # fmt: skip


def spelling(rng: random.Random) -> str:
    """The spelling of three words."""
    words = rng.sample(_WORDS, 3)
    style = rng.choice(("{w}: {s}", "How do you spell {w}? {s}.", "{s} spells {w}.",
                        "{w} has {n} letters.", "{w} begins with {f}."))  # fmt: skip
    return "\n".join(
        style.format(w=word, s="-".join(word), n=len(word), f=word[0]) for word in words
    )


WRITERS: list[tuple[Callable[[random.Random], str], float]] = [
    (story, 18), (moods, 10), (questions, 16), (chat, 20), (reading, 14), (notes, 20),
    (retelling, 24), (shouting, 9), (word_lists, 12), (lists_and_pairs, 5), (spelling, 3),
    (letter, 4),
]  # fmt: skip


def documents(seed: int, characters: int) -> list[str]:
    """Documents with a total of about `characters` characters; the seed determines them."""
    rng = random.Random(seed)
    writers, weights = zip(*WRITERS, strict=True)
    texts: list[str] = []
    written = 0
    while written < characters:
        for writer in rng.choices(writers, weights, k=64):
            texts.append(writer(rng))
            written += len(texts[-1])
    return texts
