"""Generators of argument and result values: names, places, dates, amounts, identifiers.

A value has two faces: the JSON that stands in a call, and the text that stands in a request. They
are the same words wherever possible, because the model that learns from these data copies well and
computes badly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import agent_words as words


@dataclass(frozen=True, slots=True)
class Value:
    """One value: `json` as a call or result holds it, `text` as a sentence says it."""

    json: Any
    text: str


@dataclass(frozen=True, slots=True)
class Generator:
    """Draws values; `schema` is the JSON Schema that all of them satisfy."""

    draw: Callable[[Random], Value]
    schema: dict[str, Any]


def text_of(value: Any) -> str:
    """A JSON value as a sentence says it: lists become "a, b and c", strings stay bare."""
    if isinstance(value, list):
        parts = [text_of(item) for item in value]
        return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def of(make: Callable[[Random], Any], **schema: Any) -> Generator:
    """A generator from a function that makes the JSON value."""

    def draw(rng: Random) -> Value:
        value = make(rng)
        return Value(value, text_of(value))

    return Generator(draw, schema)


def string(make: Callable[[Random], str]) -> Generator:
    """A generator of free strings."""
    return of(make, type="string")


def word(options: Sequence[str]) -> Generator:
    """A string out of `options`, which the schema does not list."""
    return of(lambda rng: rng.choice(options), type="string")


def one_of(*options: str) -> Generator:
    """A string out of `options`, which the schema lists as an enum."""
    return of(lambda rng: rng.choice(options), type="string", enum=list(options))


def integer(low: int, high: int, step: int = 1) -> Generator:
    """An integer in [low, high], a multiple of `step` above `low`."""
    return of(lambda rng: rng.randrange(low, high + 1, step), type="integer")


def number(low: float, high: float, digits: int = 2) -> Generator:
    """A number in [low, high] with at most `digits` decimals; whole numbers are written whole."""

    def make(rng: Random) -> float | int:
        value = round(rng.uniform(low, high), digits if rng.random() < 0.6 else 0)
        return int(value) if value == int(value) else value

    return of(make, type="number")


def some(item: Generator, low: int, high: int) -> Generator:
    """A list of `low` to `high` different values of `item`."""

    def make(rng: Random) -> list[Any]:
        found: list[Any] = []
        count = rng.randint(low, high)
        while len(found) < count:
            value = item.draw(rng).json
            if value not in found:
                found.append(value)
        return found

    return of(make, type="array", items=item.schema)


FLAG = of(lambda rng: rng.random() < 0.5, type="boolean")


def _identifier(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(['-', ''])}{rng.randint(10, 99999)}"


def _person(rng: Random) -> str:
    return f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.LAST_NAMES)}"


def _email(rng: Random) -> str:
    first, last = rng.choice(words.FIRST_NAMES), rng.choice(words.LAST_NAMES)
    box = rng.choice([f"{first}.{last}", first, f"{first[0]}{last}"]).lower()
    return f"{box}@{rng.choice(words.MAIL_DOMAINS)}"


def _iso_date(rng: Random) -> str:
    return f"{rng.choice([2025, 2026, 2027])}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _date(rng: Random) -> str:
    """A date as people write it; the call repeats it literally."""
    day, month = rng.randint(1, 28), rng.choice(words.MONTHS)
    weekday = rng.choice(words.WEEKDAYS)
    spoken = [
        "today", "tomorrow", weekday, f"next {weekday}", f"{day} {month}", f"{month} {day}",
    ]  # fmt: skip
    return _iso_date(rng) if rng.random() < 0.4 else rng.choice(spoken)


def _time(rng: Random) -> str:
    if rng.random() < 0.7:
        return f"{rng.randint(6, 22):02d}:{rng.choice([0, 15, 30, 45]):02d}"
    return f"{rng.randint(1, 11)} {rng.choice(['am', 'pm'])}"


def _title(rng: Random) -> str:
    return f"{rng.choice(words.TOPICS)} {rng.choice(words.MEETINGS)}"


def _file(rng: Random) -> str:
    stem = rng.choice([words.FILE_STEMS, words.TOPICS])
    name = rng.choice(stem).replace(" ", "_").lower()
    mark = rng.choice(["", "", f"_{rng.randint(1, 12)}", f"-{rng.randint(2019, 2026)}"])
    return f"{name}{mark}.{rng.choice(words.EXTENSIONS)}"


def _folder(rng: Random) -> str:
    depth = rng.randint(1, 2)
    return "/" + "/".join(rng.choice(words.FOLDERS) for _ in range(depth))


def _address(rng: Random) -> str:
    return f"{rng.randint(1, 240)} {rng.choice(words.STREETS)}"


def _phone(rng: Random) -> str:
    return f"+{rng.randint(20, 99)} {rng.randint(100, 999)} {rng.randint(100000, 9999999)}"


def _product(rng: Random) -> str:
    return f"{rng.choice(words.PRODUCT_KINDS)} {rng.choice(words.PRODUCTS)}"


def _sentence(rng: Random) -> str:
    return rng.choice(words.SENTENCES).format(
        n=rng.randint(2, 30), day=rng.choice(words.WEEKDAYS), topic=rng.choice(words.TOPICS).lower()
    )


def _song(rng: Random) -> str:
    return f"{rng.choice(words.SONG_STARTS)} {rng.choice(words.SONG_ENDS)}"


def _book(rng: Random) -> str:
    return f"The {rng.choice(words.SONG_ENDS)} of {rng.choice(words.CITIES)}"


ID = string(_identifier)
PERSON = string(_person)
FIRST_NAME = word(words.FIRST_NAMES)
EMAIL = string(_email)
CITY = word(words.CITIES)
COUNTRY = word(words.COUNTRIES)
ADDRESS = string(_address)
PHONE = string(_phone)
DATE = string(_date)
ISO_DATE = string(_iso_date)
TIME = string(_time)
TITLE = string(_title)
TOPIC = string(lambda rng: rng.choice(words.TOPICS).lower())
FILE = string(_file)
FOLDER = string(_folder)
PRODUCT = string(_product)
FOOD = word(words.FOODS)
ROOM = word(words.ROOMS)
SENTENCE = string(_sentence)
SONG = string(_song)
BOOK = string(_book)
ARTIST = string(lambda rng: f"{rng.choice(words.BAND_STARTS)} {rng.choice(words.BAND_ENDS)}")
COMPANY = string(lambda rng: f"{rng.choice(words.LAST_NAMES)} {rng.choice(words.COMPANY_ENDS)}")
CURRENCY = word(words.CURRENCIES)
LANGUAGE = word(words.LANGUAGES)
TABLE = word(words.TABLES)
