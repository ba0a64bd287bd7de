"""The words that problems are made of: listed ones, and names and things that nobody has seen.

A made name or thing is composed of syllables, so that a model learns to copy whatever stands there.
"""

from __future__ import annotations

import random

NAMES = (
    "Ava Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kate Liam Maya Noah Olive Paul Quinn Rosa "
    "Sam Tara Uma Vera Will Zoe Adam Beth Carl Dora Eric Fay Gina Hans Ida Joel Karen Leo Mona "
    "Nick Oscar Pia Ravi Sara Tom Vik Wendy Yara Alice Bob Charlie David Emma Frank George Hannah "
    "Isabel James Julia Kevin Laura Lucy Maria Mark Mary Mike Mia Nina Nora Olivia Peter Rachel "
    "Sophie Susan Tim Tina Victor Xavier Zed Zara Anna Amir Chen Diego Fatima Ivan Jane John Jose "
    "Lena Lily Max Mei Omar Priya Raj Robert Ruth Simon Sofia Steve Theo Yusuf Anika Bella Chloe"
).split()
THINGS = (
    (
        "apples pears plums lemons shells stamps coins cards pens pencils books marbles buttons "
        "stickers beads cakes muffins cookies eggs flowers pebbles candles ribbons balloons "
        "peaches "
        "cherries nuts badges posters seeds bricks tiles roses bottles photos magnets keys stones "
        "oranges bananas grapes mangoes tomatoes potatoes carrots onions strawberries melons "
        "sweets "
        "candies chocolates cupcakes sandwiches pies donuts rolls biscuits pizzas crayons markers "
        "notebooks erasers rulers envelopes letters postcards magazines comics toys dolls blocks "
        "balls "
        "kites puzzles cars trains robots dice cups plates spoons forks bowls glasses mugs "
        "chairs lamps "
        "pillows towels shirts socks hats scarves gloves shoes nails screws bolts batteries bulbs "
        "tickets trees tulips plants fish birds hens ducks sheep cows horses cats dogs rabbits "
        "mice "
        "bees frogs turtles files songs pictures feathers leaves acorns toy_cars sheets_of_paper "
        "trading_cards tennis_balls baseball_cards rubber_bands paper_clips bars_of_soap candy_bars"
    )
    .replace("  ", " ")
    .split()
)
THINGS = [thing.replace("_", " ") for thing in THINGS]
ADJECTIVES = (
    "red blue green yellow white black old new small big large tiny shiny pretty wooden round "
    "heavy "
    "little colourful beautiful"
).split()
HOLDERS = (
    "boxes bags baskets shelves trays jars crates drawers packs bowls packets cartons bundles "
    "buckets cases tins rows stacks piles sacks containers bins pouches plates folders"
).split()
PLACES = (
    "at the market|in the garden|at school|at home|in town|at the beach|in the park|at the shop|"
    "in the kitchen|at a fair|in the forest|on the farm|at the store|in the library|at work"
).split("|")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
GOODS = (
    "ticket notebook lamp kite puzzle hat belt cup bell toy ball mug pillow rope book pen pencil "
    "sandwich shirt apple cake coffee pizza toy_car scarf bag chair plant poster game burger melon "
    "magazine doll bottle_of_water chocolate_bar T-shirt backpack umbrella clock vase stamp muffin"
).split()
GOODS = [good.replace("_", " ") for good in GOODS]
SORTS = (
    ("cats", "dogs", "[animals|pets]"),
    ("boys", "girls", "[children|pupils|students|kids]"),
    ("apples", "pears", "[pieces of fruit|fruits]"),
    ("oranges", "bananas", "[pieces of fruit|fruits]"),
    ("red marbles", "blue marbles", "marbles"),
    ("green balls", "yellow balls", "balls"),
    ("roses", "tulips", "flowers"),
    ("cars", "trucks", "vehicles"),
    ("cars", "buses", "vehicles"),
    ("cows", "sheep", "animals"),
    ("hens", "ducks", "birds"),
    ("chickens", "goats", "animals"),
    ("pens", "pencils", "[things to write with|pens and pencils]"),
    ("novels", "comics", "books"),
    ("adults", "children", "people"),
    ("men", "women", "people"),
    ("teachers", "students", "people"),
    ("forks", "spoons", "pieces of cutlery"),
    ("chairs", "tables", "pieces of furniture"),
    ("red cars", "white cars", "cars"),
    ("big boxes", "small boxes", "boxes"),
    ("carrots", "potatoes", "vegetables"),
    ("muffins", "cookies", "[treats|baked goods]"),
    ("black buttons", "white buttons", "buttons"),
    ("oaks", "pines", "trees"),
)
"""Two sorts of a thing, and what they are together."""
ACTIVITIES = (
    ("read", "pages"),
    ("bake", "[cakes|cookies|muffins|loaves]"),
    ("run", "[km|kilometres|miles]"),
    ("walk", "[kilometres|miles|steps]"),
    ("sell", "[tickets|newspapers|cups of lemonade|pies]"),
    ("score", "[points|goals]"),
    ("write", "[letters|pages|words|emails]"),
    ("swim", "[lengths|laps]"),
    ("earn", "[dollars|euros|coins]"),
    ("save", "[dollars|euros|pounds]"),
    ("spend", "[dollars|euros]"),
    ("study", "[minutes|hours]"),
    ("practise", "[minutes|hours]"),
    ("pick", "[apples|berries|plums]"),
    ("plant", "[trees|seeds|flowers]"),
    ("paint", "[pictures|fences|walls]"),
    ("make", "[toys|chairs|bracelets]"),
    ("drive", "[km|kilometres|miles]"),
    ("ride", "[km|kilometres|miles]"),
    ("wash", "[cars|plates|windows]"),
    ("draw", "pictures"),
    ("learn", "[words|songs]"),
    ("build", "[toys|tables|kites]"),
    ("collect", "[shells|eggs|stamps|cans]"),
    ("deliver", "[parcels|newspapers|letters]"),
    ("drink", "[glasses of water|cups of tea]"),
    ("do", "[push-ups|sit-ups|exercises]"),
    ("solve", "[puzzles|problems|sums]"),
    ("watch", "[minutes of television|films|videos]"),
    ("take", "[photos|pictures]"),
)
"""What somebody does so and so much of in a time."""
CROWDS = (
    ("people", "on a bus", "get on", "get off"),
    ("passengers", "on a train", "get on", "get off"),
    ("birds", "[on|in] a tree", "[fly to it|join them|come]", "fly away"),
    ("birds", "on a [fence|wire|roof]", "[join them|arrive|land there]", "fly [away|off]"),
    ("children", "in a [class|room|classroom]", "[come in|join|arrive]", "[leave|go home]"),
    ("students", "in a [club|class|school]", "[join|come]", "leave"),
    ("guests", "at a party", "arrive", "[leave|go home]"),
    ("cars", "in a car park", "[arrive|drive in|come]", "[leave|drive away]"),
    ("cars", "in a parking lot", "arrive", "[leave|drive off]"),
    ("fish", "in a [tank|pond]", "be added", "[are taken out|swim away]"),
    ("ducks", "on a [lake|pond]", "[swim to them|join them|land]", "[fly away|swim away]"),
    ("people", "in a [room|cinema|shop|queue|lift]", "[come in|join|enter]", "[leave|go out]"),
    ("frogs", "on a log", "[join them|jump on]", "jump [off|away]"),
    ("books", "on a shelf", "be added", "be [taken away|borrowed|removed]"),
    ("sheep", "in a field", "[join them|come]", "[leave|run away]"),
    ("apples", "[on a tree|in a bowl]", "be [added|hung there]", "[are eaten|fall down]"),
    ("players", "on a team", "join", "leave"),
    ("balloons", "at a party", "be added", "[burst|pop|fly away]"),
    ("eggs", "in a basket", "be [added|put in]", "[break|are broken]"),
    ("cookies", "[in a jar|on a plate]", "be [added|put there]", "be eaten"),
)
"""Who is where, and how they come and go, in the present and the plural."""
PEOPLE = (
    ("friends", "friend"),
    ("children", "child"),
    ("neighbours", "neighbour"),
    ("people", "person"),
    ("kids", "kid"),
    ("students", "student"),
    ("pupils", "pupil"),
    ("cousins", "cousin"),
    ("players", "player"),
    ("teams", "team"),
    ("classmates", "classmate"),
    ("guests", "guest"),
    ("workers", "worker"),
    ("brothers", "brother"),
    ("girls", "girl"),
    ("boys", "boy"),
)
TIMES = ("day", "week", "hour", "month", "minute", "evening", "morning", "year")
PARTS = (
    ("spider", "legs"),
    ("car", "wheels"),
    ("bike", "wheels"),
    ("tricycle", "wheels"),
    ("dog", "legs"),
    ("insect", "legs"),
    ("chair", "legs"),
    ("hand", "fingers"),
    ("table", "legs"),
    ("flower", "petals"),
    ("house", "windows"),
    ("room", "lamps"),
    ("bus", "seats"),
    ("book", "pages"),
    ("box", "pencils"),
    ("class", "students"),
    ("team", "players"),
    ("shirt", "buttons"),
    ("week", "days"),
    ("hour", "minutes"),
    ("year", "months"),
    ("tree", "apples"),
    ("pizza", "slices"),
    ("carton", "eggs"),
    ("building", "floors"),
    ("nest", "eggs"),
    ("shelf", "books"),
    ("pack", "cards"),
    ("bag", "sweets"),
    ("table", "chairs"),
)
"""One thing, and what it has several of."""

WHOLES = (
    ("book", "pages", "@ <read> {b}[| of them| pages]"),
    ("rope", "[metres|feet|centimetres]", "@ <cut> off {b}[| {unit}]"),
    ("pizza", "slices", "@ <eat> {b}[| of them| slices]"),
    ("bottle", "[millilitres|ml]", "@ <drink> {b}[| of them| {unit}]"),
    ("tank", "litres", "@ <use> {b}[| of them| litres]"),
    ("film", "minutes", "@ <watch> {b}[| of them| minutes]"),
    ("ribbon", "[cm|centimetres|metres]", "@ <use> {b}[| {unit}] for a present"),
    ("battery", "hours", "@ <use> {b}[| of them| hours]"),
    ("trip", "[km|kilometres|miles]", "@ <drive> {b}[| of them| {unit}]"),
    ("list", "words", "@ <learn> {b}[| of them| words]"),
    ("cake", "pieces", "@ <eat> {b}[| of them| pieces]"),
    ("bag of flour", "grams", "@ <use> {b}[| of them| grams]"),
    ("wallet", "[dollars|euros|coins]", "@ <spend> {b}[| of them| {unit}]"),
)
"""What has so and so much of a unit, and what uses some of it up."""
MOVERS = (
    ("a car", "km kilometres miles"),
    ("a train", "km kilometres miles"),
    ("a bike", "km kilometres miles"),
    ("a plane", "km kilometres miles"),
    ("a snail", "centimetres metres cm"),
    ("a boat", "km miles"),
    ("a bus", "km kilometres miles"),
    ("a horse", "kilometres miles"),
    ("a robot", "metres steps"),
)
ROOMS = "room garden park school field class shop box zoo farm bag basket house street".split()
MONTHS = "January February March April May June July August September October".split()

_ONSETS = "b br c ch cl d dr f fr g gr h j k kl l m n p pr qu r s sh st t th tr v w y z".split()
_VOWELS = "a e i o u a e i o ai ea ee ia ie oo ou".split()
_CODAS = ["", "", "", *"l ll m n nn r rt s sh ss t th ck ce nd x".split()]
_MADE_NAMES, _MADE_THINGS = 0.4, 0.1
"""Shares of names and things that are made."""
_BAD_PARTS = "arse cock coon cum dick fuck kike nazi paki piss sex shit tit".split()
_OTHER_WORDS = set("do he me no she so the thee to we".split())
"""`_BAD_PARTS` offend and `_OTHER_WORDS` are words already: a made name or thing may contain none
of the former and be none of the latter."""

_ROLES = (
    "farmer baker teacher girl boy man woman gardener shopkeeper student driver painter fisherman "
    "librarian chef collector child worker florist tailor runner cook carpenter"
).split()
_FAMILY = (
    ("my sister", "she"),
    ("my brother", "he"),
    ("my mother", "she"),
    ("my father", "he"),
    ("my mum", "she"),
    ("my dad", "he"),
    ("my friend", "he"),
    ("my grandmother", "she"),
    ("my uncle", "he"),
    ("my aunt", "she"),
    ("our neighbour", "she"),
    ("my cousin", "he"),
    ("my teacher", "she"),
    ("grandpa", "he"),
    ("grandma", "she"),
    ("mum", "she"),
    ("dad", "he"),
    ("Mr Brown", "he"),
    ("Mrs Lee", "she"),
    ("Mr. Smith", "he"),
    ("Ms Green", "she"),
)
_GROUPS = "the twins,the children,the girls,the boys,my parents,some friends,the students".split(
    ","
)


def subject(r: random.Random) -> tuple[str, str, str]:
    """Draw who a story is about: as named first, as named later, and the pronoun."""
    place = r.random()
    if place < 0.66:
        who = name(r)
        return who, who, r.choice(("she", "he"))
    if place < 0.76:
        return "I", "I", "I"
    if place < 0.8:
        return "we", "we", "we"
    if place < 0.88:
        role = r.choice(_ROLES)
        return f"a {role}", f"the {role}", r.choice(("she", "he"))
    if place < 0.95:
        who, pronoun = r.choice(_FAMILY)
        return who, who, pronoun
    if place < 0.97:
        who = " and ".join(names(r, 2))
        return who, who, "they"
    who = r.choice(_GROUPS)
    return who, who.replace("some", "the"), "they"


def other(r: random.Random) -> str:
    """Draw somebody else in a story, of whom verbs are in the singular."""
    return name(r) if r.random() < 0.85 else r.choice(_FAMILY)[0]


def name(r: random.Random) -> str:
    """Return a name with a capital letter."""
    if r.random() >= _MADE_NAMES:
        return r.choice(NAMES)
    first = r.choice("aeiou") + r.choice("lnrmd") if r.random() < 0.25 else ""
    made = first + "".join(_syllable(r) for _ in range(r.randint(1, 2)))
    return made.capitalize() if _is_fit(made) else "Robin"


def names(r: random.Random, count: int) -> list[str]:
    """Return `count` different names."""
    lines: set[str] = set()
    while len(lines) < count:
        lines.add(name(r))
    return r.sample(sorted(lines), count)


def thing(r: random.Random) -> str:
    """Return the plural noun of a thing to count."""
    if r.random() >= _MADE_THINGS:
        return r.choice(THINGS)
    made = "".join(_syllable(r) for _ in range(r.randint(1, 2)))
    return made + "s" if _is_fit(made) else "things"


def plural(good: str) -> str:
    """Return the plural of one of `GOODS`."""
    head, of, rest = good.partition(" of ")
    if head.endswith(("ch", "x", "s")):
        head += "e"
    head = head[:-1] + "ve" if head.endswith("f") else head
    return f"{head}s{of}{rest}"


def article(noun: str) -> str:
    """Return "a" or "an", as the noun requires."""
    return "an" if noun[0] in "aeiou" or noun == "hour" else "a"


def _is_fit(made: str) -> bool:
    return made not in _OTHER_WORDS and not any(part in made for part in _BAD_PARTS)


def _syllable(r: random.Random) -> str:
    return r.choice(_ONSETS) + r.choice(_VOWELS) + r.choice(_CODAS)
