"""Words that fill the requests: people, towns, days, codes. All are short, plain, and of letters, digits and blanks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

Draw = Callable[[random.Random], str]
"""Draws one text."""


def one_of(words: str) -> Draw:
    """One of the texts in `words`, which commas separate."""
    choices = tuple(word.strip() for word in words.split(","))
    return lambda rng: rng.choice(choices)


def _day(rng: random.Random) -> str:
    return f"20{rng.randint(31, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(7, 21):02}:{rng.choice(('00', '15', '30', '45'))}"


def _person(rng: random.Random) -> str:
    return f"{_FIRST_NAME(rng)} {_LAST_NAME(rng)}"


def _address(rng: random.Random) -> str:
    return f"{rng.randint(2, 98)} {_STREET(rng)}"


def code(prefix: str) -> Draw:
    """Codes of `prefix` and five digits, as a system would number its entries."""
    return lambda rng: f"{prefix}{rng.randint(10_000, 99_999)}"


_FIRST_NAME: Final = one_of(
    "Ada, Bram, Cleo, Dario, Edda, Femi, Greta, Hugo, Ines, Jonas, Kaja, Liam, Mira, Noor, Otis"
)
_LAST_NAME: Final = one_of(
    "Aldous, Brekke, Costa, Dahl, Ekman, Ferro, Grau, Hald, Ito, Juhl, Kovac, Lund, Moreau, Novak"
)
_STREET: Final = one_of("Alder Lane, Bell Street, Canal Road, Dock Street, Elm Walk, Ferry Road, Glass Alley, Hill Way")

DAY: Final[Draw] = _day
TIME: Final[Draw] = _time
PERSON: Final[Draw] = _person
ADDRESS: Final[Draw] = _address
TOWN: Final = one_of(
    "Porto, Bergen, Ghent, Lyon, Graz, Turin, Malmo, Cork, Leeds, Utrecht, Basel, Vilnius, Gdansk, Split, Bilbao"
)
CROP: Final = one_of("tomatoes, carrots, beans, leeks, pumpkins, radishes, spinach, basil, garlic, onions, peas, chard")
BED: Final = one_of("north, south, herb, rose, corner, long, upper, lower, kitchen, fence")
BOOK: Final = one_of(
    "The Salt Road, Nine Lanterns, A Field of Glass, The Quiet Mill, Paper Tigers, North of Noon, Low Tide"
)
SUBJECT: Final = one_of(
    "bridges, beekeeping, maps, volcanoes, pottery, birds, chess, rivers, glaciers, sailing, clocks"
)
DISH: Final = one_of(
    "lentil soup, apple pie, mushroom risotto, fish stew, pancakes, potato salad, onion tart, bean chili, plum cake"
)
INGREDIENT: Final = one_of("flour, sugar, rice, oats, cocoa, butter, honey, yeast, salt, semolina")
MEDICINE: Final = one_of("Calmorin, Dentavil, Flexaten, Hydrolin, Nasofen, Pulmodex, Relaxil, Sunavit, Tensolan")
ROOM: Final = one_of("bedroom, kitchen, hall, study, attic, bathroom, nursery, living room, cellar, workshop")
COURSE: Final = one_of("algebra, botany, drawing, physics, Latin, geography, music, chemistry, history, woodwork")
ARTIST: Final = one_of("The Tin Owls, Marla Quist, Blue Ferry, Echo Parade, Sven Arlo, The Paper Kites Club, Nora Vale")
SONG: Final = one_of(
    "Harbour Lights, Slow Train, Winter Coat, Two Moons, Copper Sky, Rain on Tin, Open Window, Left Shoe"
)
INSTRUMENT: Final = one_of("violin, cello, guitar, banjo, harp, ukulele, mandolin, viola")
THING: Final = one_of("umbrella, red scarf, laptop bag, camera, walking stick, black hat, flute case, green backpack")
MATERIAL: Final = one_of("oak, pine, birch, steel, copper, brass, maple, walnut, slate")
TEAM: Final = one_of("Red Herons, Iron Foxes, River Rats, Night Owls, Stone Bears, Sea Hawks, Pine Martens")
BOAT: Final = one_of("Albatross, Blue Marlin, Calypso, Driftwood, Evening Star, Gannet, Sea Thistle, White Heron")
EXHIBIT: Final = one_of("bronze horse, silver mask, clay lamp, whale bone, glass crown, stone calendar, painted shield")
CAR: Final = one_of("Falke 200, Rana City, Vela Estate, Orso Van, Lince Sport, Nimbus Coupe")
STAR: Final = one_of("Vega, Altair, Rigel, Deneb, Capella, Spica, Antares, Arcturus")
