"""Texts followed by the same facts in another form: answers, notes, summaries and lists.

They teach the base model to find a word of the text and to write it in another context: after a
quote, a bracket or an equals sign, in capitals, or in a shorter sentence. The demo tasks need this
ability. There are many notations here, but not those of the tasks (JSON and telegrams).
"""

import random
import re

from demo_stories import UNQUOTED_EVENTS
from demo_world import ADJECTIVES, VERBS, WEATHER, Scene, capitalised, lines, rows, vocabulary

_PAST = {base: past for base, past, _ in VERBS}
_DEEDS = (
    ("buy", "things"), ("find", "things"), ("eat", "snacks"), ("see", "animals"),
    ("make", "things"), ("sell", "snacks"), ("draw", "animals"), ("lose", "things"),
)  # fmt: skip
_OPENINGS = lines("""
    On {day}, {A} went {to_place} with {B}.
    {A} and {B} went {to_place} on {day}.
    On {day}, {B} took {A} {to_place}.
    It was {day}. {A} was {at_place} with {B}.
    {A} was {at_place} on a {weather} {day}. {B} was there too.
    It was a {weather} {day}. {A} met {B} {at_place}.
    {A} went {to_place} on {day}, and {B} came with {A}.
""")


def _report(scene: Scene, deed: tuple[str, str]) -> str:
    """A short text about two people who go to a place, with the deed among other events."""
    verb, items = deed
    past = _PAST[verb]
    what_happened = scene.rng.sample(UNQUOTED_EVENTS, scene.rng.choice((0, 0, 1, 1, 2)))
    what = f"{past} {{n}} {{colour}} {{{items}}}"
    deed_told = f"(There {{A}} {what}|{{A}} {what}|{{He}} {what} {{at_place}})."
    what_happened.insert(scene.rng.randint(0, len(what_happened)), deed_told)
    return scene.write(" ".join([scene.rng.choice(_OPENINGS), *what_happened]))


_ANSWER_STYLES = (
    ("Question: {q}", "Answer: {a}"), ("Q: {q}", "A: {a}"), ("{q}", "{a}"), ("- {q}", "  {a}"),
    ("{q}", '"{a}"'), ("Q: {q}", 'A: "{a}"'), ("{q}", "[{a}]"), ("{q}", "({a})"), ("{q}", "= {a}"),
    ("Q={q}", "A={a}"), ("{q}", "*{a}*"), ("<q>{q}</q>", "<a>{a}</a>"), ("{q}", "It is '{a}'."),
)  # fmt: skip


def reading(rng: random.Random) -> str:
    """A short text and questions about it, answered in words of the text."""
    scene, (verb, items) = Scene(rng), rng.choice(_DEEDS)
    some = f"{{{items}}}"
    asked = [
        ("Who was with {A}?", "{B}"),
        ("Where was {A}?", "{at_place}"),
        ("What place was it?", "{place}"),
        ("When was it?", "on {day}"),
        ("What day was it?", "{day}"),
        (f"What did {{A}} {verb}?", f"{{n}} {{colour}} {some}"),
        (f"What kind of {some}?", f"{{colour}} {some}"),
        (f"How many {some} did {{A}} {verb}?", "{n}"),
        (f"Who {_PAST[verb]} the {some}?", "{A}"),
        (f"What colour were the {some}?", "{colour}"),
    ]
    question_style, answer_style = rng.choice(_ANSWER_STYLES)
    parts = [_report(scene, (verb, items))]
    for question, answer in rng.sample(asked, rng.randint(1, 5)):
        parts.append(question_style.format(q=scene.write(question)))
        parts.append(answer_style.format(a=scene.write(answer)))
    return "\n".join(parts)


# slot of the scene | a name of it in notes | another name | ...
_KEYS = rows("""
    A|name|hero|person|child|Name; B|friend|guest|partner|Friend; day|day|date|Day|on;
    place|place|town|at|Place|goal; goods|goods|things|item|bag|Goods; n|number|amount|many|Number;
    colour|colour|paint|Colour; job|job|worker|Job; animal|animal|pet|Animal;
    weather|weather|sky|Weather; food|food|meal|Food
""")
# format of a field | separator of fields | format of the whole note
_NOTE_STYLES = (
    ("{k} = {v}", "\n", "{}"), ("{k} = {v}", ", ", "{}"), ('{k} = "{v}"', "\n", "{}"),
    ('{k}="{v}"', " ", "<{}>"), ("{k}={v}", " ", "{}"), ("{k}={v}", ";", "({})"),
    ("- {k}: {v}", "\n", "{}"), ("{k}: {v}", "\n", "{}"), ("{k}: {v}", "; ", "[{}]"),
    ('{k}: "{v}"', ", ", "{{{}}}"), ("{k}: '{v}'", ", ", "{{{}}}"), ("'{k}': '{v}'", "\n", "{}"),
    ('"{k}" is "{v}"', ", ", "{}"), ('("{k}", "{v}")', ", ", "[{}]"), ("({k} {v})", " ", "({})"),
    ("<{k}>{v}</{k}>", "\n", "{}"), ("<{k}>{v}</{k}>", "", "<note>{}</note>"),
    ("| {k} | {v} |", "\n", "{}"), ("|{k}|{v}|", "\n", "{}"), ("{k}\t{v}", "\n", "{}"),
    ("{k} -> {v}", "\n", "{}"), ("{v} <- {k}", ", ", "{}"), ("[{k}] {v}", " ", "{}"),
    ('"{v}"', ", ", "[{}]"), ('"{v}"', " ", "{}"), ("{v}", ", ", "[{}]"), ("{v}", ";", "{}"),
    ("{v}", "/", "{}"), ("[{v}]", " ", "{}"), ("#{v}", " ", "{}"), ('The {k} is "{v}".', " ", "{}"),
    ("{k} {v}", ", ", "{}"), ('{k} "{v}"', "\n", "{}"), ("* {k}:{v}", "\n", "{}"),
)  # fmt: skip
_NOTE_HEADS = ("\n", "\nNotes:\n", "\nNote: ", "\nCard:\n", "\nCard: ", "\nData: ", "\nList:\n",
               "\nFields: ", "\nIn short: ", "\n=> ", "\nForm:\n", "\nTable:\n")  # fmt: skip


def notes(rng: random.Random) -> str:
    """Texts, each followed by a note with some of its facts. All notes have the same notation."""
    field, between, around = rng.choice(_NOTE_STYLES)
    head, capitals = rng.choice(_NOTE_HEADS), rng.random() < 0.15
    keys = {slot: rng.choice(names) for slot, *names in _KEYS}
    order = rng.sample(tuple(keys), len(keys))
    if rng.random() < 0.6:  # Use only slots that occur in every text.
        order = [slot for slot in order if slot in ("A", "B", "day", "place", "goods", "n")]
    order = order[: rng.randint(2, 7)]
    texts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        scene, deed = Scene(rng), rng.choice(_DEEDS)
        text = _report(scene, deed)
        scene["goods"] = scene.write(f"{{colour}} {{{deed[1]}}}")
        present = [slot for slot in order if re.search(rf"\b{scene[slot]}\b", text)]
        fields = [field.format(k=keys[slot], v=scene[slot]) for slot in present or ["A"]]
        note = around.format(between.join(fields))
        texts.append(f"{text}{head}{note.upper() if capitals else note}")
    return "\n\n".join(texts)


# A sentence, and a shorter one that uses only its words.
_RETOLD = rows("""
    {A} and {B} went {to_place} on {day}.|{day} {A} and {B} went to {place};
    On {day}, {A} was {at_place} with {B}.|on {day} {A} with {B};
    It was a {weather} {day} in {season}.|{weather} {day};
    {A} made {a_colour} {thing} for {B}.|{A} made {colour} {thing};
    {A} bought {a_colour} {thing} {at_place}.|{A} bought {thing};
    {B} gave {A} {a_food} and {a_snack}.|{B} gave {food};
    {B} met a {adjective} {job} {at_place}.|{B} met {job};
    {A} saw {a_animal} near the {place}.|{A} saw {animal};
    The {adjective} {animal} ran away.|{animal} ran away;
    The {animal} jumped over the {thing}.|{animal} jumped over {thing};
    {C} came along and sang a song.|{C} sang;
    {C} called {A} at {n} in the morning.|{C} called {A};
    {B} lost {his2} {colour2} {thing} in the water.|{B} lost {colour2} {thing};
    {A} found {n} {snacks} under the table.|found {n} {snacks};
    Then they sat down and had {a_food}.|had {food};
    After that it began to snow.|began to snow;
    {B} wanted to {do_there}.|{B} wanted to {do_there};
    The {job} told them a story about {a_animal}.|{job} told story;
    {A} counted {n} {things} {at_place}.|counted {n} {things};
    {B} put the {thing} behind the old chair.|{thing} behind chair;
    {C} was very {adjective} that day.|{C} {adjective};
    {A} and {C} danced all night.|danced all night;
    In the end, everybody went home.|went home
""")
_SMALL_WORDS = re.compile(r"\b(a|an|the|was|were|very|some|his|her|and|that|then|it)\s+", re.I)
_SHORTENINGS = (
    lambda sentence, short: short,
    lambda sentence, short: short,
    lambda sentence, short: capitalised(short),
    lambda sentence, short: _SMALL_WORDS.sub("", sentence),
    lambda sentence, short: sentence,
    lambda sentence, short: " ".join(sentence.replace(",", "").split()[:3]),
    lambda sentence, short: sentence.split()[-1],
    lambda sentence, short: f"{short.split()[0]} ... {short.split()[-1]}",
)
_ITEM_STYLES = (
    ("{k}. {s}", "\n"), ("{k}) {s}", "\n"), ("- {s}", "\n"), ("* {s}", "\n"), ("{s}", "\n"),
    ("{s}", "; "), ("{s}", " / "), ("{s}", ", "), ("{s}", " ... "), ("{s}", " + "), ("{s}", " - "),
    ('"{s}"', ", "), ("[{s}]", " "), ("<line>{s}</line>", "\n"), ("{s}.", " "), ("{s}!", " "),
    ("{s}", " THEN "), ("{s}", " AND "), ("{s}", " next "), ("{s}", " over "), ("First {s}", ", "),
    ("{s} (that was {k})", ", "), ("{s}", " => "),
)  # fmt: skip
_RETELLING_HEADS = ("\n", "\nShort:\n", "\nIn short: ", "\nAgain: ", "\nAgain:\n", "\nSummary: ",
                    "\nDiary:\n", "\nHeadlines: ", "\nWhat happened?\n", "\nMemo: ")  # fmt: skip


def retelling(rng: random.Random) -> str:
    """A text, and the same told again in order, sentence by sentence, mostly in fewer words."""
    scene = Scene(rng)
    scene["his2"] = "his" if scene["bhe"] == "he" else "her"
    told = [
        (scene.write(sentence), scene.write(short))
        for sentence, short in rng.sample(_RETOLD, rng.choice((2, 3, 4, 5, 6, 7, 8, 9)))
    ]
    shorten, capitals = rng.choice(_SHORTENINGS), rng.random() < 0.4
    item, between = rng.choice(_ITEM_STYLES)
    again = []
    for k, (sentence, short) in enumerate(told, 1):
        text = shorten(sentence.rstrip("."), short)
        again.append(item.format(k=k, s=text.upper() if capitals else text))
    text = rng.choice((" ", " ", " ", "\n")).join(sentence for sentence, _ in told)
    return text + rng.choice(_RETELLING_HEADS) + between.join(again)


_LIST_STYLES = (
    ("{}", " ", "{}"), ("{}", ", ", "{}"), ('"{}"', ", ", "{}"), ('"{}"', ", ", "[{}]"),
    ("'{}'", " ", "{}"), ("{}", ",", "{}"), ("{}", "/", "{}"), ("[{}]", "", "{}"),
    ("{}=", "", "{}"), ("- {}", "\n", "\n{}"), ("<{}>", " ", "{}"), ("{}", "\n", "\n{}"),
    ("{}", " | ", "| {} |"), ("({})", " ", "{}"), ("{}", "-", "{}"), ("*{}*", " ", "{}"),
    ("={}", "\n", "\n{}"),
)  # fmt: skip
_WORDS = [*vocabulary(), *WEATHER, *ADJECTIVES]


def word_lists(rng: random.Random) -> str:
    """The same words in two or three notations."""
    words = rng.sample(_WORDS, rng.randint(2, 8))
    if rng.random() < 0.3:
        words = [" ".join(rng.sample(_WORDS, 2)) for _ in words[:4]]
    if rng.random() < 0.15:
        words = words[::-1] + words[:2]
    head = rng.choice(("", "", "Words: ", "Copy: ", "Say: ", "Again: ", "List: "))
    parts = []
    for item, between, around in rng.sample(_LIST_STYLES, rng.choice((2, 2, 3))):
        again = [word.upper() for word in words] if rng.random() < 0.35 else words
        parts.append(head + around.format(between.join(map(item.format, again))))
    return rng.choice(("\n", "\n", " => ", " -> ", " = ")).join(parts)
