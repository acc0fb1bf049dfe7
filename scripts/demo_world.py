"""The small invented world of the demo: its words, its scenes and its facts.

The base model's corpus (`demo_corpus.py`) and the demo tasks (`make_demo_tasks.py`) are generated
from this world and a seed.

In templates, `{slot}` is filled from a `Scene`, and one choice is taken from `(a|b|c)`.
"""

import random
import re
from typing import NamedTuple


def rows(text: str) -> list[list[str]]:
    """The cells of a small table: `;` ends a row, `|` separates its cells."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().split(";")]


def lines(text: str) -> list[str]:
    """The lines of `text` without their indentation."""
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
ANIMALS = rows("""
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
FOODS = rows("""
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
THINGS = rows("""
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
PLACES = rows("""
    market|at|buy food; park|in|play games; school|at|learn to read; library|at|borrow books;
    beach|on|build sand castles; forest|in|look for mushrooms; farm|on|feed the animals;
    zoo|at|watch the lions; museum|in|look at old things; station|at|wait for the train;
    harbour|in|watch the boats; garden|in|plant flowers; kitchen|in|cook dinner;
    bakery|at|buy bread; river|at|catch fish; lake|at|swim; castle|in|meet the king;
    village|in|visit friends; hospital|in|get well; theatre|in|see a play
""")
# name | what they do | where | tool
JOBS = rows("""
    baker|bakes bread|at the bakery|an oven; farmer|grows corn|on the farm|a plough;
    teacher|teaches children|at school|chalk; doctor|helps sick people|in the hospital|a needle;
    fisher|catches fish|in the harbour|a net; painter|paints pictures|in the museum|a brush;
    gardener|plants flowers|in the garden|a spade; cook|cooks dinner|in the kitchen|a pan;
    sailor|sails ships|on the sea|a rope; driver|drives a bus|at the station|a map;
    singer|sings songs|in the theatre|a voice; carpenter|builds tables|in the village|a saw;
    tailor|sews coats|at the market|a needle; guard|watches the gate|in the castle|a lamp
""")
OPPOSITES = rows("""
    big|small; hot|cold; fast|slow; happy|sad; old|new; high|low; wet|dry; open|closed;
    light|dark; loud|quiet; clean|dirty; strong|weak; early|late; full|empty; near|far; hard|soft;
    long|short; rich|poor; up|down; left|right; good|bad; first|last; day|night; black|white;
    sweet|sour
""")
# base | past | -ing
VERBS = rows("""
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


def article(noun: str) -> str:
    """`noun` with "a" or "an" before it; mass nouns begin with "some" and stay unchanged."""
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
    """`sentence` with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


class Scene(dict[str, str]):
    """The people, things, places and times of one text: a value for every slot of templates."""

    def __init__(self, rng: random.Random):
        """Draws a scene with three different people from `rng`."""
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
            do_there=place[2], job=job[0], colour=colour, a_colour=article(colour), colour2=colour2,
            adjective=rng.choice(ADJECTIVES), n=str(rng.randint(2, 12)), day=rng.choice(DAYS),
            month=rng.choice(MONTHS), season=rng.choice(SEASONS), weather=rng.choice(WEATHER),
        )  # fmt: skip

    def write(self, template: str) -> str:
        """`template` with its choices made and its slots filled."""
        while "|" in template:
            template = _CHOICES.sub(self._choose, template)
        return _SLOT.sub(lambda match: self[match[1]], template)

    def _choose(self, match: re.Match[str]) -> str:
        return self.rng.choice(match[1].split("|"))


_CHOICES = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")


class Fact(NamedTuple):
    """Something that is true in the world.

    Attributes:
      question: a question about the fact.
      answer: the answer in one or a few words.
      phrasings: sentences that state the fact, the usual one first; without a capital first letter.
    """

    question: str
    answer: str
    phrasings: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The usual phrasing, as a sentence."""
        return capitalised(self.phrasings[0])


# kind: question | usual phrasing | other phrasing | ...; the question is about {x}, {y} answers it
_FORMS = {
    form[0]: form[1:]
    for form in rows("""
    diet|what does {x} eat?|{x} eats {y}.|{y} is what {x} eats.|it eats {y}.
        |the food of {x} is {y}.|if you have {x}, give it {y}.;
    home|where does {x} live?|{x} lives {y}.|{y} is where {x} lives.|it lives {y}.
        |the home of {x} is {y}.|look for {x} {y}.;
    sound|what does {x} say?|{x} says {y}.|{y} is what {x} says.|it says {y}.
        |the sound of {x} is {y}.|"{y}, {y}!" says {x}.;
    baby|what is a baby {x} called?|a baby {x} is called {y}.|{y} is a baby {x}.|it is called {y}.
        |the baby of the {x} is {y}.;
    kind|what kind of animal is {x}?|{x} is {y}.|it is {y}.|we say that {x} is {y}.
        |{y} is the kind of animal that {x} is.;
    colour|what colour is {x}?|{x} is {y}.|it is {y}.|the colour of {x} is {y}.
        |{y} is the colour of {x}.;
    taste|how does {x} taste?|{x} tastes {y}.|it tastes {y}.|{y} is how {x} tastes.
        |the taste of {x} is {y}.;
    food|what kind of food is {x}?|{x} is {y}.|it is {y}.|we say that {x} is {y}.
        |{y} is the kind of food that {x} is.;
    material|what is {x} made of?|{x} is made of {y}.|it is made of {y}.|they make {x} of {y}.
        |{y} is what {x} is made of.|you need {y} to make {x}.;
    thing|what kind of thing is {x}?|{x} is {y}.|it is {y}.|we say that {x} is {y}.
        |{y} is the kind of thing that {x} is.;
    place|what do people do {x}?|people {y} {x}.|they {y}.|{x}, people {y}.|you can {y} {x}.;
    job|what does {x} do?|{x} {y}.|one who {y} is {x}.|it is {x} who {y}.|every day {x} {y}.;
    work|where does {x} work?|{x} works {y}.|{y} is where {x} works.|you can find {x} {y}.
        |the work of {x} is {y}.;
    tool|what does {x} need?|{x} needs {y}.|{y} is what {x} needs.|{x} works with {y}.
        |the tool of {x} is {y}.|{x} cannot work without {y}.|give {x} {y}.;
    opposite|what is the opposite of {x}?|the opposite of {x} is {y}.|{y} is the opposite of {x}.
        |it is {y}.|what is not {x} is {y}.;
    plural|what is the plural of {x}?|the plural of {x} is {y}.|{y} is the plural of {x}.
        |it is {y}.|one {x}, two {y}.;
    past|what is the past of {x}?|the past of {x} is {y}.|{y} is the past of {x}.|it is {y}.
        |today they {x}, yesterday they {y}.;
    after|what comes after {x}?|after {x} comes {y}.|{y} comes after {x}.|it is {y}.
        |first {x}, then {y}.;
    before|what comes before {x}?|before {x} comes {y}.|{y} comes before {x}.|it is {y}.
        |first {y}, then {x}.;
    sum|what is {x}?|{x} is {y}.|{y} is {x}.|it is {y}.
    """)
}


def _facts() -> dict[str, list[Fact]]:
    facts: dict[str, list[Fact]] = {kind: [] for kind in _FORMS}

    def add(kind: str, x: str, y: str) -> None:
        question, *phrasings = (form.format(x=x, y=y) for form in _FORMS[kind])
        facts[kind].append(Fact(capitalised(question), y, tuple(phrasings)))

    for name, sound, food, home, baby, animal_kind in ANIMALS:
        add("diet", article(name), food)
        add("home", article(name), home)
        add("sound", article(name), sound)
        add("baby", name, article(baby))
        add("kind", article(name), article(animal_kind))
    for name, food_kind, colour, taste in FOODS:
        the = f"the {name.removeprefix('some ')}"
        add("colour", the, colour)
        add("taste", the, taste)
        add("food", the, article(food_kind))
    for name, thing_kind, material in THINGS:
        add("material", article(name), material)
        add("thing", article(name), article(thing_kind))
    for name, preposition, action in PLACES:
        add("place", f"{preposition} the {name}", action)
    for name, action, where, tool in JOBS:
        add("job", article(name), action)
        add("work", article(name), where)
        add("tool", article(name), tool)
    for one, other in OPPOSITES:
        add("opposite", one, other)
        add("opposite", other, one)
    for noun in dict.fromkeys([*PLURALS, *(row[0] for row in ANIMALS + THINGS), *SNACKS]):
        add("plural", noun, plural(noun))
    for base, past, _ in VERBS:
        add("past", base, past)
    for names in (DAYS, MONTHS):
        for name, following in zip(names, names[1:] + names[:1], strict=True):
            add("after", name, following)
            add("before", following, name)
    for x in range(1, 11):
        for y in range(1, 11):
            add("sum", f"{x} plus {y}", str(x + y))
    return facts


FACTS = _facts()


def any_fact(rng: random.Random) -> Fact:
    """A random fact. The kind is drawn first, so that all kinds are equally frequent."""
    return rng.choice(FACTS[rng.choice(tuple(FACTS))])


def vocabulary() -> list[str]:
    """The words that the texts repeat most often."""
    nouns = [row[0] for row in ANIMALS + THINGS + PLACES + JOBS]
    foods = [row[0].removeprefix("some ") for row in FOODS]
    plurals = [plural(noun) for noun in [*SNACKS, *(row[0] for row in THINGS)]]
    actions = [word for row in PLACES for word in row[2].split()]
    words = [*BOYS, *GIRLS, *COLOURS, *DAYS, *nouns, *foods, *plurals, *actions, "stop"]
    return list(dict.fromkeys(words))


def answer_words() -> list[str]:
    """The words of all answers, which the model recalls better if each is a single token."""
    answers = (fact.answer for facts in FACTS.values() for fact in facts)
    return list(dict.fromkeys(word for answer in answers for word in answer.split()))


def quoted_words() -> list[str]:
    """The words of `vocabulary` that often occur in quotes: names, days, colours and places."""
    return [*BOYS, *GIRLS, *DAYS, *COLOURS, *(row[0] for row in PLACES)]
