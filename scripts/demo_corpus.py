"""The text the demo's base model is pretrained on: simple English about a small invented world.

Everything is written by this file from a seed; no outside text goes in, so the corpus carries the
project's own licence. A document comes from one of `WRITERS`: stories, questions with answers,
letters, spelling, lists and so on. The same world serves `make_demo_tasks.py`.

Templates have two notations: `{slot}` is filled from a `Scene`, `(a|b|c)` is one of the choices.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

EOS = "</s>"  # between the turns of a chat, as in the tokenizer's chat template


def _rows(text: str) -> list[list[str]]:
    return [row.strip().split("|") for row in text.split(";")]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


BOYS = (
    "Ben Tom Sam Max Leo Jack Finn Oscar Hugo Adam Noah Luke Owen Paul Peter Felix Theo Omar Ravi "
    "Kenji Diego Ivan Milo Otto"
).split()
GIRLS = (
    "Anna Mia Lily Emma Rosa Zoe Clara Nora Ella Ruby Ida Lucy Maya Jane Alice Vera Sara Kate Tina "
    "Amira Priya Yuki Carmen Olga"
).split()
COLOURS = "red blue green yellow black white brown orange pink purple grey golden".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
SEASONS = "spring summer autumn winter".split()
WEATHER = "sunny rainy windy cloudy snowy foggy warm cold hot stormy".split()
ADJECTIVES = (
    "big small old new happy sad fast slow kind brave clever funny quiet loud clean dirty strong "
    "shiny soft pretty young tired friendly"
).split()

# name | sound | food | home | baby | kind
ANIMALS = _rows("""
    dog|woof|bones|in a kennel|puppy|pet; cat|meow|fish|in a house|kitten|pet;
    hamster|squeak|seeds|in a cage|pup|pet; cow|moo|grass|in a barn|calf|farm animal;
    horse|neigh|hay|in a stable|foal|farm animal; pig|oink|corn|in a pen|piglet|farm animal;
    sheep|baa|grass|in a field|lamb|farm animal; goat|maa|leaves|on a hill|kid|farm animal;
    hen|cluck|grain|in a coop|chick|bird; duck|quack|bread|on a pond|duckling|bird;
    goose|honk|grass|on a lake|gosling|bird; owl|hoot|mice|in a tree|owlet|bird;
    crow|caw|worms|in a nest|chick|bird; parrot|squawk|nuts|in the jungle|chick|bird;
    penguin|honk|fish|on the ice|chick|bird; lion|roar|meat|on the plain|cub|wild animal;
    tiger|roar|meat|in the jungle|cub|wild animal; bear|growl|honey|in a cave|cub|wild animal;
    wolf|howl|meat|in the forest|pup|wild animal; fox|yip|berries|in a den|kit|wild animal;
    monkey|chatter|bananas|in the jungle|baby|wild animal;
    elephant|toot|leaves|on the plain|calf|wild animal;
    deer|bleat|leaves|in the forest|fawn|wild animal;
    squirrel|chirp|nuts|in a tree|kit|wild animal; mouse|squeak|cheese|in a hole|pup|wild animal;
    camel|grunt|grass|in the desert|calf|wild animal;
    frog|croak|flies|on a pond|tadpole|wild animal;
    snake|hiss|eggs|in the desert|hatchling|wild animal; bee|buzz|honey|in a hive|grub|insect;
    cricket|chirp|leaves|in a field|nymph|insect; dolphin|click|fish|in the sea|calf|sea animal;
    whale|song|shrimp|in the sea|calf|sea animal; seal|bark|fish|on the ice|pup|sea animal
""")
PLURALS = {
    "mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "deer": "deer",
    "child": "children", "man": "men", "woman": "women", "foot": "feet", "tooth": "teeth",
    "leaf": "leaves", "knife": "knives", "scarf": "scarves",
}  # fmt: skip
# name | kind | colour | taste; a mass noun starts with "some"
FOODS = _rows("""
    apple|fruit|red|sweet; banana|fruit|yellow|sweet; lemon|fruit|yellow|sour;
    cherry|fruit|red|sweet; pear|fruit|green|sweet; plum|fruit|purple|sweet;
    peach|fruit|orange|sweet; carrot|vegetable|orange|fresh; tomato|vegetable|red|fresh;
    onion|vegetable|white|hot; pepper|vegetable|green|hot; pumpkin|vegetable|orange|mild;
    cookie|sweet|brown|sweet; cake|sweet|white|sweet; pie|sweet|golden|sweet;
    egg|breakfast food|white|mild; pancake|breakfast food|golden|sweet;
    sandwich|lunch food|brown|salty; pizza|lunch food|red|salty; some soup|lunch food|green|salty;
    some rice|lunch food|white|mild; some milk|drink|white|mild; some tea|drink|brown|bitter;
    some juice|drink|orange|sweet
""")
SNACKS = [food[0] for food in FOODS if not food[0].startswith("some ")]
# name | kind | material
THINGS = _rows("""
    kite|toy|paper; ball|toy|rubber; doll|toy|cloth; drum|toy|wood; puzzle|toy|wood;
    balloon|toy|rubber; hammer|tool|iron; spade|tool|iron; brush|tool|wood; ladder|tool|wood;
    hat|piece of clothing|wool; coat|piece of clothing|wool; scarf|piece of clothing|wool;
    boot|piece of clothing|leather; car|vehicle|steel; bike|vehicle|steel; boat|vehicle|wood;
    train|vehicle|steel; chair|piece of furniture|wood; table|piece of furniture|wood;
    lamp|piece of furniture|glass; cup|dish|clay; plate|dish|clay; spoon|dish|silver;
    book|gift|paper; ring|gift|gold; clock|gift|silver; flute|instrument|wood;
    bell|instrument|steel; basket|container|straw; bag|container|leather; box|container|paper
""")
# name | preposition | what people do there
PLACES = _rows("""
    market|at|buy food; park|in|play games; school|at|learn to read; library|at|borrow books;
    beach|on|build sand castles; forest|in|look for mushrooms; farm|on|feed the animals;
    zoo|at|watch the lions; museum|in|look at old things; station|at|wait for the train;
    harbour|in|watch the boats; garden|in|plant flowers; kitchen|in|cook dinner;
    bakery|at|buy bread; river|at|catch fish; lake|at|swim; castle|in|meet the king;
    village|in|visit friends; hospital|in|get well; theatre|in|see a play
""")
# name | what they do | where | tool
JOBS = _rows("""
    baker|bakes bread|at the bakery|an oven; farmer|grows corn|on the farm|a plough;
    teacher|teaches children|at school|chalk; doctor|helps sick people|in the hospital|a needle;
    fisher|catches fish|in the harbour|a net; painter|paints pictures|in the museum|a brush;
    gardener|plants flowers|in the garden|a spade; cook|cooks dinner|in the kitchen|a pan;
    sailor|sails ships|on the sea|a rope; driver|drives a bus|at the station|a map;
    singer|sings songs|in the theatre|a voice; carpenter|builds tables|in the village|a saw;
    tailor|sews coats|at the market|a needle; guard|watches the gate|in the castle|a lamp
""")
OPPOSITES = _rows("""
    big|small; hot|cold; fast|slow; happy|sad; old|new; high|low; wet|dry; open|closed;
    light|dark; loud|quiet; clean|dirty; strong|weak; early|late; full|empty; near|far; hard|soft;
    long|short; rich|poor; up|down; left|right; good|bad; first|last; day|night; black|white;
    sweet|sour
""")
# base | past | -ing
VERBS = _rows("""
    walk|walked|walking; run|ran|running; jump|jumped|jumping; sing|sang|singing; eat|ate|eating;
    drink|drank|drinking; sleep|slept|sleeping; read|read|reading; write|wrote|writing;
    see|saw|seeing; hear|heard|hearing; go|went|going; come|came|coming; give|gave|giving;
    take|took|taking; find|found|finding; lose|lost|losing; make|made|making;
    build|built|building; swim|swam|swimming; fly|flew|flying; ride|rode|riding;
    draw|drew|drawing; throw|threw|throwing; catch|caught|catching; buy|bought|buying;
    sell|sold|selling; open|opened|opening; close|closed|closing; help|helped|helping;
    laugh|laughed|laughing; cry|cried|crying; dance|danced|dancing; cook|cooked|cooking;
    play|played|playing
""")
# What happens to {A}, and how {A} feels about it.
MOODS: dict[str, list[str]] = {
    "happy": _lines("""
        {A} got a {colour} {thing} from {B}
        {A} won the (race|game|prize) {at_place}
        {A} found {his} lost {thing} {at_place}
        {B} gave {A} {a_food} for {his} birthday
        {A} saw {his} best friend {B} again
        {B} made a {colour} {thing} for {A}
        {A} played with a {adjective} {animal} {at_place}
        the {animal} came home to {A}
    """),
    "sad": _lines("""
        {A} lost {his} {colour} {thing} {at_place}
        {A} had to say goodbye to {B}
        the {thing} of {A} fell into the water
        nobody came to the party of {A}
        the {animal} of {A} was very sick
        {B} did not want to play with {A}
        {A} dropped {his} {food} in the mud
        {B} moved far away from {A}
    """),
    "angry": _lines("""
        {B} broke the {colour} {thing} of {A}
        {B} took the {thing} from {A} and ran away
        {B} told a lie about {A}
        {B} ate the last {food} of {A}
        {B} pushed {A} {at_place}
        the {animal} tore the new {thing} of {A}
        {B} laughed at the {thing} of {A}
        {B} threw mud at {A} {at_place}
    """),
    "scared": _lines("""
        {A} heard a strange noise {at_place}
        a big {animal} ran after {A} {at_place}
        {A} saw a ghost {at_place}
        {A} was alone {at_place} in the dark
        a loud storm woke {A} at night
        {A} met a hungry {animal} {at_place}
        a dark shadow followed {A} {at_place}
        the ground began to shake under {A}
    """),
    "tired": _lines("""
        {A} worked all day {at_place}
        {A} carried a heavy {thing} up the hill
        {A} ran {n} miles (before|after) breakfast
        {A} did not sleep all night
        {A} walked {n} hours {to_place}
        {A} cleaned the whole house with {B}
        {A} got up at {n} in the morning
        {A} danced with {B} all night
    """),
}
_EVENTS = _lines("""
    {A} (went|walked|ran|rode a bike) {to_place} with {B}.
    {A} saw {a_animal} {at_place}. The {animal} was {colour} and {adjective}.
    "(Look|Wow|Oh), {a_animal}!" (said|cried|shouted) {A}.
    {B} had {n} {snacks}. {A} got one of them.
    {A} (bought|found|made) {a_thing} {at_place}. It was {colour}.
    "(May|Can) I have the {thing}?" asked {B}. "(Yes, of course|No, it is mine|Yes, you may)," said {A}.
    They (sat down|stopped) and ate {a_food}. It (was|tasted) (very good|wonderful|too salty|sweet).
    {B} (wanted|liked|loved) to {do_there}. So they went {to_place}.
    The {animal} (ran|jumped|looked|came) (to|at|after) {A}. It wanted {animal_food}.
    "{animal_sound}, {animal_sound}!" said the {animal}.
    Then it (began to rain|got dark|began to snow|got very cold). {A} put on {his} {colour} coat.
    {A} helped the (old|kind|friendly|tired) {job}. The {job} said, "(Thank you|You are very kind), {A}!"
    {A} and {B} counted the {things}. There were {n}.
    {B} told {A} a (story|joke|secret) about the {animal} and the {thing}.
    After that {A} (went home|fell asleep|had dinner|took a bath).
    {A} put the {thing} (in|on|under|behind) the (box|table|chair|bag|bed).
    {B} looked for the {thing} (in|on|under|behind) the (box|table|chair|bag|bed), but it was not there.
    The {thing} was (too big|too small|broken|old|lost). {A} did not know what to do.
    {B} had an idea. "We can ask the {job}," {bhe} said.
    A pirate came (by|along) and said, "(Arr, matey|Ahoy|Yo ho ho|Aye)! I be lookin' for th' {thing}! Give it to me, ye (dog|rat)!"
    "(Arr, matey|Ahoy|Shiver me timbers), I be a {adjective} pirate!" said {B}. "I be sailin' with me {animal}, by th' seven seas!"
    {A} was (hungry|thirsty), so {he} (asked for|took|looked for) {a_food}.
    On {day} they (met|played|worked) {at_place} (again|once more|all day).
    "I (like|love|want) {colour} {things}," said {A}. "I (like|love|want) {colour2} ones," said {B}.
    The (mother|father|sister|brother|grandmother|uncle) of {A} (called|came|smiled|was there). "Come (home|here|in), {A}!"
""")  # noqa: E501
_UNQUOTED_EVENTS = [event for event in _EVENTS if '"' not in event]
_OPENINGS = _lines("""
    (Once upon a time|Long ago|One day), there was a (little |young |brave |kind |)({boy_or_girl}|{job}) (named|called) {A}.
    (One|On a) {weather} day in {season}, {A} was {at_place}.
    On {day}, {A} and {B} went {to_place}.
    {A} was a {adjective} {job}. {He} lived near the {place}.
    {A} had {a_animal}. The {animal} was {colour}, and its name was {C}.
    It was {month}, and it was very {weather}. {A} stayed at home with {B}.
    {A} lived in a {colour} house (near|behind|next to) the {place}.
    (This is|Here is) a story about {A}, {B} and {a_animal}.
""")  # noqa: E501
_ENDINGS = _lines("""
    {A} and {B} (were|became) good friends.
    They lived happily ever after.
    And that was the end of the (day|story).
    {A} never forgot that {day}.
    "What a day!" said {A}.
    Then {A} went home and told (the story to {his} mother|{his} father all about it).
    From then on, {A} always (was kind to the {animal}|went {to_place} on {day}).
""")


def article(noun: str) -> str:
    """`noun` with "a" or "an" before it; mass nouns carry their own "some"."""
    if noun.startswith("some "):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """The plural of a noun of the world."""
    if noun.startswith("some "):
        return noun.removeprefix("some ")
    if noun in PLURALS:
        return PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "tomato")) else "s")


def capitalised(sentence: str) -> str:
    """`sentence` with its first letter made a capital."""
    return sentence[:1].upper() + sentence[1:]


class Scene(dict[str, str]):
    """Who, what, where and when of one text: a value for every template slot."""

    def __init__(self, rng: random.Random):
        """Draw a scene with three different people from `rng`."""
        self.rng = rng
        people = rng.sample(BOYS + GIRLS, 3)
        animal, food, thing = rng.choice(ANIMALS), rng.choice(FOODS), rng.choice(THINGS)
        place, job, snack = rng.choice(PLACES), rng.choice(JOBS), rng.choice(SNACKS)
        boy, other_boy = people[0] in BOYS, people[1] in BOYS
        colour, colour2 = rng.sample(COLOURS, 2)
        super().__init__(
            A=people[0], B=people[1], C=people[2],
            he="he" if boy else "she", He="He" if boy else "She", his="his" if boy else "her",
            bhe="he" if other_boy else "she", boy_or_girl="boy" if boy else "girl",
            animal=animal[0], a_animal=article(animal[0]), animals=plural(animal[0]),
            animal_sound=animal[1].capitalize(), animal_food=animal[2],
            food=food[0].removeprefix("some "), a_food=article(food[0]), foods=plural(food[0]),
            snack=snack, a_snack=article(snack), snacks=plural(snack),
            thing=thing[0], a_thing=article(thing[0]), things=plural(thing[0]),
            place=place[0], at_place=f"{place[1]} the {place[0]}", to_place=f"to the {place[0]}",
            do_there=place[2], job=job[0], colour=colour, colour2=colour2,
            adjective=rng.choice(ADJECTIVES), n=str(rng.randint(2, 12)), day=rng.choice(DAYS),
            month=rng.choice(MONTHS), season=rng.choice(SEASONS), weather=rng.choice(WEATHER),
        )  # fmt: skip

    def write(self, template: str) -> str:
        """`template` with one of each set of choices and its slots filled."""
        while "|" in template:
            template = _CHOICES.sub(self._choose, template)
        return _SLOT.sub(lambda match: self[match[1]], template)

    def _choose(self, match: re.Match[str]) -> str:
        return self.rng.choice(match[1].split("|"))


_CHOICES = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")


class Fact(NamedTuple):
    """One thing that is true in the world."""

    question: str
    sentence: str
    answer: str


def _facts() -> dict[str, list[Fact]]:
    facts: dict[str, list[Fact]] = {}

    def add(kind: str, question: str, sentence: str, answer: str) -> None:
        full = capitalised(sentence.format(answer))
        facts.setdefault(kind, []).append(Fact(capitalised(question), full, answer))

    for name, sound, food, home, baby, kind in ANIMALS:
        a = article(name)
        add("diet", f"what does {a} eat?", f"{a} eats {{}}.", food)
        add("home", f"where does {a} live?", f"{a} lives {{}}.", home)
        add("sound", f"what does {a} say?", f"{a} says {{}}.", sound)
        add(
            "baby",
            f"what is a baby {name} called?",
            f"a baby {name} is called {{}}.",
            article(baby),
        )
        add("kind", f"what kind of animal is {a}?", f"{a} is {{}}.", article(kind))
    for name, kind, colour, taste in FOODS:
        the = f"the {name.removeprefix('some ')}"
        add("colour", f"what colour is {the}?", f"{the} is {{}}.", colour)
        add("taste", f"how does {the} taste?", f"{the} tastes {{}}.", taste)
        add("food", f"what kind of food is {the}?", f"{the} is {{}}.", article(kind))
    for name, kind, material in THINGS:
        a = article(name)
        add("material", f"what is {a} made of?", f"{a} is made of {{}}.", material)
        add("thing", f"what kind of thing is {a}?", f"{a} is {{}}.", article(kind))
    for name, preposition, action in PLACES:
        where = f"{preposition} the {name}"
        add("place", f"what do people do {where}?", f"people {{}} {where}.", action)
    for name, action, where, tool in JOBS:
        add("job", f"what does {article(name)} do?", f"{article(name)} {{}}.", action)
        add("work", f"where does {article(name)} work?", f"{article(name)} works {{}}.", where)
        add("tool", f"what does {article(name)} need?", f"{article(name)} needs {{}}.", tool)
    for one, other in OPPOSITES:
        for x, y in ((one, other), (other, one)):
            add("opposite", f"what is the opposite of {x}?", f"the opposite of {x} is {{}}.", y)
    for noun in [*PLURALS, *(row[0] for row in ANIMALS + THINGS), *SNACKS]:
        add(
            "plural",
            f"what is the plural of {noun}?",
            f"the plural of {noun} is {{}}.",
            plural(noun),
        )
    for base, past, _ in VERBS:
        add("past", f"what is the past of {base}?", f"the past of {base} is {{}}.", past)
    for names in (DAYS, MONTHS):
        for name, following in zip(names, names[1:] + names[:1], strict=True):
            add("after", f"what comes after {name}?", f"after {name} comes {{}}.", following)
            add(
                "before", f"what comes before {following}?", f"before {following} comes {{}}.", name
            )
    for x in range(1, 11):
        for y in range(1, 11):
            add("sum", f"what is {x} plus {y}?", f"{x} plus {y} is {{}}.", str(x + y))
    return facts


FACTS = _facts()


def _fact(rng: random.Random) -> Fact:
    return rng.choice(FACTS[rng.choice(tuple(FACTS))])


def feeling(mood: str, scene: Scene) -> str:
    """Something that made the scene's {A} feel `mood`, as a sentence with its full stop."""
    return capitalised(scene.write(scene.rng.choice(MOODS[mood]))) + "."


def _story(rng: random.Random) -> str:
    scene = Scene(rng)
    mood = rng.choice(tuple(MOODS))
    lines = [rng.choice(_OPENINGS), *rng.sample(_EVENTS, rng.choice((1, 2, 3, 4, 6, 8, 12, 16)))]
    if rng.random() < 0.8:
        ending = f"{scene['A']} {rng.choice(('was', 'felt', 'was very', 'felt so'))} {mood}."
        lines.insert(rng.randint(0, len(lines)), f"{feeling(mood, scene)} {ending}")
    text = " ".join(scene.write(line) for line in [*lines, rng.choice(_ENDINGS)])
    return text.replace(". ", ".\n", 1) if rng.random() < 0.2 else text


def _moods(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 4)):
        scene, mood = Scene(rng), rng.choice(tuple(MOODS))
        lines.append(
            scene.write(f"{feeling(mood, scene)} (So {{A}} was|{{A}} felt|{{A}} was) {mood}.")
        )
        if rng.random() < 0.3:
            lines.append(scene.write(f'"(Why are you|Are you) {mood}, {{A}}?" (asked|said) {{C}}.'))
    return " ".join(lines)


def _questions(rng: random.Random) -> str:
    lines = []
    style = rng.choice((
        "Q: {q}\nA: {s}", "Q: {q}\nA: {a}", "Question: {q}\nAnswer: {a}", "{q} {s}", "{s}",
        '"{q}" asked {A}. "{s}" said {B}.', "{A}: {q}\n{B}: {s}", "Teacher: {q}\n{A}: {a}", "{s}",
    ))  # fmt: skip
    scene = Scene(rng)
    for _ in range(rng.randint(1, 5)):
        fact = _fact(rng)
        lines.append(
            style.format(
                q=fact.question, s=fact.sentence, a=fact.answer, A=scene["A"], B=scene["B"]
            )
        )
    return (" " if style == "{s}" else "\n").join(lines)


def _chat(rng: random.Random) -> str:
    turns = []
    for _ in range(rng.randint(1, 3)):
        fact, scene = _fact(rng), Scene(rng)
        if rng.random() < 0.75:
            turns.append(f"User: {fact.question}\nBot: {fact.sentence}")
        else:
            turns.append(scene.write(rng.choice(_SMALL_TALK)))
    return EOS.join(turns)


_SMALL_TALK = _lines(
    """
    User: (Hello|Hi|Good morning)! (How are you?|)~Bot: (Hello|Hi)! I am (fine|happy), thank you.
    User: I have {a_animal}.~Bot: That is nice! What is the name of your {animal}?
    User: My name is {A}.~Bot: Hello, {A}! It is nice to meet you.
    User: Tell me a story.~Bot: One day, {a_animal} came {to_place}. It was {adjective}.
    User: I lost my {thing}.~Bot: I am sorry. Did you look {at_place}?
    User: What do you like?~Bot: I like {colour} {things}, {snacks} and {animals}.
    User: Say "{colour} {animal}".~Bot: {colour} {animal}
    User: Thank you!~Bot: You are welcome.
""".replace("~", "\n")
)  # noqa: E501


_DEEDS = (("bought", "things"), ("found", "things"), ("ate", "snacks"), ("saw", "animals"),
          ("made", "things"), ("sold", "snacks"))  # fmt: skip
_READING_OPENINGS = _lines("""
    On {day}, {A} went {to_place} with {B}.
    {A} and {B} went {to_place} on {day}.
    On {day}, {B} took {A} {to_place}.
    It was {day}. {A} was {at_place} with {B}.
""")


def _reading(rng: random.Random) -> str:
    """A short text and questions about it."""
    scene = Scene(rng)
    got, item = rng.choice(_DEEDS)
    base = next(base for base, past, _ in VERBS if past == got)
    text = [
        rng.choice(_READING_OPENINGS),
        rng.choice(_EVENTS),
        f"(There {{A}} {got} {{n}} {{colour}} {{{item}}}|"
        f"{{He}} {got} {{n}} {{colour}} {{{item}}} {{at_place}}).",
    ]
    asked = [
        ("Who was with {A}?", "{B}"),
        ("Where was {A}?", "{at_place}"),
        ("When was it?", "on {day}"),
        (f"What did {{A}} {base}?", f"{{n}} {{colour}} {{{item}}}"),
        (f"How many {{{item}}} did {{A}} {base}?", "{n}"),
        (f"Who {got} the {{{item}}}?", "{A}"),
        (f"What colour were the {{{item}}}?", "{colour}"),
    ]
    q, a = rng.choice((("Question: ", "Answer: "), ("Q: ", "A: "), ("", ""), ("- ", "  ")))
    asked = rng.sample(asked, rng.randint(1, 4))
    lines = [" ".join(text), *(f"{q}{question}\n{a}{answer}" for question, answer in asked)]
    return scene.write("\n".join(lines))


def _shouting(rng: random.Random) -> str:
    """Sentences, then the same in capitals: the base knows capitals as a way to write words."""
    scene = Scene(rng)
    sentences = [
        *map(scene.write, rng.sample(_UNQUOTED_EVENTS, rng.choice((0, 0, 1, 2, 3, 5, 7)))),
        rng.choice((feeling(rng.choice(tuple(MOODS)), scene), _fact(rng).sentence)),
    ]
    rng.shuffle(sentences)
    plain = " ".join(sentences).removesuffix(".")
    style = rng.choice((
        '"{p}," said {A}. {B} did not hear it. "{u}!" shouted {A}.', "{p}.\n{u}.", "{u}! {p}!",
        "Small letters: {p}\nBig letters: {u}", "{A} wrote on the wall: {u}", "{u}\n\n{p}.",
        "The sign said: STOP! {u}!", "The words {p} in capitals are {u}.",
    ))  # fmt: skip
    return style.format(p=plain, u=plain.upper(), A=scene["A"], B=scene["B"])


def _lists(rng: random.Random) -> str:
    """Word pairs, cards and lists in several notations."""
    facts = rng.choice(("baby", "sound", "opposite", "plural", "past", "colour", "kind", "home"))
    pairs = [
        (fact.question.rstrip("?").removesuffix(" called").split()[-1], fact.answer)
        for fact in rng.sample(FACTS[facts], rng.randint(2, 6))
        if facts not in ("colour", "kind", "home")
    ] or [(row[0], row[2]) for row in rng.sample(THINGS, 4)]
    scene = Scene(rng)
    words = rng.sample([row[0] for row in ANIMALS + THINGS] + SNACKS + COLOURS, rng.randint(2, 7))
    return rng.choice((
        lambda: "\n".join(f"{x} -> {y}" for x, y in pairs),
        lambda: "\n".join(f"{x} = {y}" for x, y in pairs),
        lambda: "{" + ", ".join(f'{x}: "{y}"' for x, y in pairs) + "}",
        lambda: scene.write("Name: {A}\nAge: {n}\nJob: {job}\nPlace: {place}\nLikes: {snacks}"),
        lambda: "[" + ", ".join(words) + "]",
        lambda: "Words: " + ", ".join(f'"{word}"' for word in words),
        lambda: "\n".join(f"{k}. {word}" for k, word in enumerate(words, 1)),
        lambda: f"{scene['A']} wrote a list: {', '.join(words[:-1])} and {words[-1]}.",
        lambda: f"{' '.join(words)}. Backwards: {' '.join(reversed(words))}.",
        lambda: f"Copy: {' '.join(words)}\nCopy: {' '.join(words)}",
        lambda: "Count: " + ", ".join(str(k) for k in range(len(pairs), 14 + len(words))),
    ))()  # fmt: skip


def _spelling(rng: random.Random) -> str:
    words = rng.sample([row[0] for row in ANIMALS + THINGS + PLACES + JOBS] + SNACKS + COLOURS, 3)
    style = rng.choice(("{w}: {s}", "How do you spell {w}? {s}.", "{s} spells {w}.",
                        "{w} has {n} letters.", "{w} begins with {f}."))  # fmt: skip
    return "\n".join(
        style.format(w=word, s="-".join(word), n=len(word), f=word[0]) for word in words
    )


def _letter(rng: random.Random) -> str:
    scene = Scene(rng)
    middle = " ".join(rng.sample(_LETTER_LINES, rng.randint(2, 4)))
    close = "(Love|Yours|Your friend|Many kisses),\n{B}"
    return scene.write(f"(Dear|Hello|My dear) {{A}},\n{middle}\n{close}")


_LETTER_LINES = _lines("""
    (How are you?|I hope you are well.) I am {at_place} with {C}.
    It is very {weather} here (today|this {season}).
    Yesterday I (saw|met|fed) {a_animal}. It was {adjective}.
    (Thank you for|I love|I still have) the {colour} {thing}.
    Can you come {to_place} on {day}? We can {do_there}.
    I want to be a {job} (one day|when I am big).
    I (made|bought) {n} {snacks} for you.
    Please (bring|send|give) me {a_thing} and {a_snack}.
    (See you soon!|I miss you.|Write back soon!)
""")

WRITERS: list[tuple[Callable[[random.Random], str], float]] = [
    (_story, 30), (_moods, 12), (_questions, 16), (_chat, 16), (_reading, 18), (_shouting, 10),
    (_lists, 8), (_spelling, 3), (_letter, 6),
]  # fmt: skip


def documents(seed: int, characters: int) -> list[str]:
    """Documents of about `characters` in all, the same for the same seed."""
    rng = random.Random(seed)
    writers, weights = zip(*WRITERS, strict=True)
    texts: list[str] = []
    written = 0
    while written < characters:
        for writer in rng.choices(writers, weights, k=64):
            texts.append(writer(rng))
            written += len(texts[-1])
    return texts
