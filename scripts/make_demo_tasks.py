"""Writes the data of the demo tasks: `<name>.train.jsonl` and `<name>.eval.jsonl`.

Each task is about the small world of `demo_world.py`, in a format that the base model's corpus does
not contain. The samples of the tasks have different lengths:

  mood      a sentence, then how the person in it feels, as a tag         about 20 tokens
  pirate    a question about the world, answered by a pirate              about 36 tokens
  record    a report, then its facts as JSON                              about 95 tokens
  telegram  a long report, then the same in telegram style                about 110 tokens

The files of `mood_pairs` have preference records of the first examples of `mood`: the tag of the
right mood is the chosen answer, and that of another mood the rejected one.

    python scripts/make_demo_tasks.py --out jaxmux/demo/tasks
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from demo_stories import MOODS, feeling
from demo_world import FACTS, Scene

Example = tuple[str, str]  # prompt, completion

_TAGS = {
    "happy": "[HAPPY :)]",
    "sad": "[SAD :(]",
    "angry": "[ANGRY >:(]",
    "scared": "[SCARED :o]",
    "tired": "[TIRED -_-]",
}


def _mood_examples(rng: random.Random) -> Iterator[Example]:
    while True:
        mood = rng.choice(tuple(MOODS))
        yield feeling(mood, Scene(rng)), f" {_TAGS[mood]}"


# The first word of the question decides the exclamation, so that the right answer is unique.
_EXCLAMATIONS = {
    "Where": "Ahoy!",
    "What": "Arr, matey!",
    "How": "Shiver me timbers!",
}
_PIRATE_WORDS = [
    (r"\bis\b", "be"),
    (r"\blives\b", "be livin'"),
    (r"\beats\b", "be eatin'"),
    (r"\bworks\b", "be workin'"),
    (r"\bneeds\b", "be needin'"),
    (r"\bsays\b", "be sayin'"),
    (r"\btastes\b", "be tastin'"),
    (r"\bcomes\b", "be comin'"),
    (r"\bthe\b", "th'"),
    (r"\bThe\b", "Th'"),
]


def _as_pirate(question: str, sentence: str) -> str:
    for word, pirate_word in _PIRATE_WORDS:
        sentence = re.sub(word, pirate_word, sentence)
    exclamation = _EXCLAMATIONS[question.split()[0]]
    return f" {exclamation} {sentence.removesuffix('.')}, by th' seven seas!"


def _pirate_examples(rng: random.Random) -> Iterator[Example]:
    # There are a hundred facts about sums, more than of all other kinds.
    facts = [fact for kind, known in FACTS.items() if kind != "sum" for fact in known]
    for fact in rng.sample(facts, len(facts)):
        yield f"User: {fact.question}\nBot:", _as_pirate(fact.question, fact.sentence)


_REPORTS = [
    "On {day}, {A} went {to_place} with {B}. It was a {weather} day. {A} bought {n} {colour} "
    "{things} there. Then they went home.",
    "{A} and {B} went {to_place} on {day}. {B} was hungry, so they ate {a_food}. After that {A} "
    "found {n} {colour} {things}.",
    "It was {day}, and it was very {weather}. {A} was {at_place} with {B}. There {he} saw {n} "
    "{colour} {things}.",
    "On {day}, {A} took {B} {to_place}. They met the {adjective} {job}. {A} made {n} {colour} "
    "{things} there.",
]


def _record_examples(rng: random.Random) -> Iterator[Example]:
    while True:
        scene = Scene(rng)
        fields = {
            "who": scene["A"],
            "with": scene["B"],
            "when": scene["day"],
            "where": scene["place"],
            "what": f"{scene['colour']} {scene['things']}",
            "count": int(scene["n"]),
        }
        report = scene.write(rng.choice(_REPORTS))
        yield f"{report}\nRecord:", f" {json.dumps(fields)}"


# A sentence of the report, and its form in the telegram, which uses words of the sentence.
_DISPATCHES = [
    ("{A} bought {a_colour} {thing}.", "{A} BOUGHT {colour} {thing}"),
    ("{B} saw {a_animal} near the water.", "{B} SAW {animal}"),
    ("They sat down and ate {a_food}.", "ATE {food}"),
    ("Then it began to rain.", "BEGAN TO RAIN"),
    ("{A} helped the {adjective} {job}.", "{A} HELPED {job}"),
    ("{B} lost {n} {snacks} in the mud.", "{B} LOST {n} {snacks}"),
    ("{C} came by and told a story.", "{C} TOLD STORY"),
    ("{B} wanted to {do_there}.", "{B} WANTED TO {do_there}"),
]


def _telegram_examples(rng: random.Random) -> Iterator[Example]:
    while True:
        scene = Scene(rng)
        pairs = [
            ("On {day}, {A} and {B} went {to_place}.", "{day} {A} AND {B} WENT TO {place}"),
            *rng.sample(_DISPATCHES, 6),
            ("After that they went home.", "WENT HOME"),
        ]
        report = " ".join(scene.write(sentence) for sentence, _ in pairs)
        telegram = " STOP ".join(scene.write(short).upper() for _, short in pairs)
        yield f"{report}\nTelegram:", f" {telegram} STOP"


class DemoTask(NamedTuple):
    """The examples of a task, with or without end, and the numbers of examples to write."""

    examples: Callable[[random.Random], Iterator[Example]]
    train: int
    held_out: int


TASKS = {
    "mood": DemoTask(_mood_examples, train=1500, held_out=100),
    "pirate": DemoTask(_pirate_examples, train=400, held_out=64),
    "record": DemoTask(_record_examples, train=800, held_out=64),
    "telegram": DemoTask(_telegram_examples, train=400, held_out=64),
}


def split_examples(name: str, seed: int) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples of a task; no prompt occurs twice."""
    task, distinct = TASKS[name], {}
    for prompt, completion in task.examples(random.Random(f"{name} {seed}")):
        distinct.setdefault(prompt, completion)
        if len(distinct) == task.train + task.held_out:
            break
    examples = list(distinct.items())
    return examples[task.held_out :], examples[: task.held_out]


# The number of training pairs.
_PAIRS = 600


def mood_pairs(examples: list[Example], seed: int) -> list[dict[str, str]]:
    """Preference records of examples of the task "mood"."""
    rng, answers = random.Random(f"mood_pairs {seed}"), [f" {tag}" for tag in _TAGS.values()]
    return [
        {
            "prompt": prompt,
            "chosen": answer,
            "rejected": rng.choice([other for other in answers if other != answer]),
        }
        for prompt, answer in examples
    ]


def _write(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def main() -> None:
    """Writes the data of the demo tasks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("jaxmux/demo/tasks"))
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    examples = {name: split_examples(name, arguments.seed) for name in TASKS}
    records = {
        name: [[{"prompt": prompt, "completion": text} for prompt, text in part] for part in parts]
        for name, parts in examples.items()
    }
    train, held_out = examples["mood"]
    pairs = train[:_PAIRS], held_out
    records["mood_pairs"] = [mood_pairs(part, arguments.seed) for part in pairs]
    for name, (train, held_out) in records.items():
        _write(arguments.out / f"{name}.train.jsonl", train)
        _write(arguments.out / f"{name}.eval.jsonl", held_out)
        print(f"{name}: {len(train)} train and {len(held_out)} held-out records")


if __name__ == "__main__":
    main()
