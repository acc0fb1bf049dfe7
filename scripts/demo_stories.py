"""Prose about the demo's world: stories, feelings, shouting and letters.

Each function writes one document with a random generator; `demo_corpus.py` calls them.
"""

import random

from demo_world import Scene, any_fact, capitalised, lines

# By feeling, the events that cause it. {A} is the person who has the feeling.
MOODS: dict[str, list[str]] = {
    "happy": lines("""
        {A} got a {colour} {thing} from {B}
        {A} won the (race|game|prize) {at_place}
        {A} found {his} lost {thing} {at_place}
        {B} gave {A} {a_food} for {his} birthday
        {A} saw {his} best friend {B} again
        {B} made a {colour} {thing} for {A}
        {A} played with a {adjective} {animal} {at_place}
        the {animal} came home to {A}
    """),
    "sad": lines("""
        {A} lost {his} {colour} {thing} {at_place}
        {A} had to say goodbye to {B}
        the {thing} of {A} fell into the water
        nobody came to the party of {A}
        the {animal} of {A} was very sick
        {B} did not want to play with {A}
        {A} dropped {his} {food} in the mud
        {B} moved far away from {A}
    """),
    "angry": lines("""
        {B} broke the {colour} {thing} of {A}
        {B} took the {thing} from {A} and ran away
        {B} told a lie about {A}
        {B} ate the last {food} of {A}
        {B} pushed {A} {at_place}
        the {animal} tore the new {thing} of {A}
        {B} laughed at the {thing} of {A}
        {B} threw mud at {A} {at_place}
    """),
    "scared": lines("""
        {A} heard a strange noise {at_place}
        a big {animal} ran after {A} {at_place}
        {A} saw a ghost {at_place}
        {A} was alone {at_place} in the dark
        a loud storm woke {A} at night
        {A} met a hungry {animal} {at_place}
        a dark shadow followed {A} {at_place}
        the ground began to shake under {A}
    """),
    "tired": lines("""
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
EVENTS = lines("""
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
UNQUOTED_EVENTS = [event for event in EVENTS if '"' not in event]
_OPENINGS = lines("""
    (Once upon a time|Long ago|One day), there was a (little |young |brave |kind |)({boy_or_girl}|{job}) (named|called) {A}.
    (One|On a) {weather} day in {season}, {A} was {at_place}.
    On {day}, {A} and {B} went {to_place}.
    {A} was a {adjective} {job}. {He} lived near the {place}.
    {A} had {a_animal}. The {animal} was {colour}, and its name was {C}.
    It was {month}, and it was very {weather}. {A} stayed at home with {B}.
    {A} lived in a {colour} house (near|behind|next to) the {place}.
    (This is|Here is) a story about {A}, {B} and {a_animal}.
""")  # noqa: E501
_ENDINGS = lines("""
    {A} and {B} (were|became) good friends.
    They lived happily ever after.
    And that was the end of the (day|story).
    {A} never forgot that {day}.
    "What a day!" said {A}.
    Then {A} went home and told (the story to {his} mother|{his} father all about it).
    From then on, {A} always (was kind to the {animal}|went {to_place} on {day}).
""")


def feeling(mood: str, scene: Scene) -> str:
    """A sentence about an event that causes the feeling `mood` in person A of the scene."""
    return capitalised(scene.write(scene.rng.choice(MOODS[mood]))) + "."


def story(rng: random.Random) -> str:
    """A story about some events and one person's feeling."""
    scene = Scene(rng)
    mood = rng.choice(tuple(MOODS))
    sentences = [rng.choice(_OPENINGS), *rng.sample(EVENTS, rng.choice((1, 2, 3, 4, 6, 8, 12, 16)))]
    if rng.random() < 0.8:
        ending = f"{scene['A']} {rng.choice(('was', 'felt', 'was very', 'felt so'))} {mood}."
        sentences.insert(rng.randint(0, len(sentences)), f"{feeling(mood, scene)} {ending}")
    text = " ".join(scene.write(line) for line in [*sentences, rng.choice(_ENDINGS)])
    return text.replace(". ", ".\n", 1) if rng.random() < 0.2 else text


def moods(rng: random.Random) -> str:
    """Several events and the feelings that they cause."""
    sentences = []
    for _ in range(rng.randint(1, 4)):
        scene, mood = Scene(rng), rng.choice(tuple(MOODS))
        sentences.append(
            scene.write(f"{feeling(mood, scene)} (So {{A}} was|{{A}} felt|{{A}} was) {mood}.")
        )
        if rng.random() < 0.3:
            sentences.append(
                scene.write(f'"(Why are you|Are you) {mood}, {{A}}?" (asked|said) {{C}}.')
            )
    return " ".join(sentences)


def shouting(rng: random.Random) -> str:
    """Sentences and their repetition in capitals, so that the model learns words in capitals."""
    scene = Scene(rng)
    sentences = [
        *map(scene.write, rng.sample(UNQUOTED_EVENTS, rng.choice((0, 0, 1, 2, 3, 5, 7)))),
        rng.choice((feeling(rng.choice(tuple(MOODS)), scene), any_fact(rng).sentence)),
    ]
    rng.shuffle(sentences)
    plain = " ".join(sentences).removesuffix(".")
    style = rng.choice((
        '"{p}," said {A}. {B} did not hear it. "{u}!" shouted {A}.', "{p}.\n{u}.", "{u}! {p}!",
        "Small letters: {p}\nBig letters: {u}", "{A} wrote on the wall: {u}", "{u}\n\n{p}.",
        "The sign said: STOP! {u}!", "The words {p} in capitals are {u}.",
    ))  # fmt: skip
    return style.format(p=plain, u=plain.upper(), A=scene["A"], B=scene["B"])


def letter(rng: random.Random) -> str:
    """A letter from one person to another."""
    scene = Scene(rng)
    middle = " ".join(rng.sample(_LETTER_LINES, rng.randint(2, 4)))
    close = "(Love|Yours|Your friend|Many kisses),\n{B}"
    return scene.write(f"(Dear|Hello|My dear) {{A}},\n{middle}\n{close}")


_LETTER_LINES = lines("""
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
