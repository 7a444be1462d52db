"""From raw text to values: text, whole numbers, decimals, truths, nothing, lists, durations."""

from fractions import Fraction

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
UNITS = {"ms": Fraction(1, 1000), "s": 1, "m": 60, "h": 3600, "d": 86400}


def unquote(raw):
    """The text between quotes, with its escapes read. Raises ValueError if the quotes do not match."""
    quote, inside = raw[0], raw[1:-1]
    if len(raw) < 2 or raw[-1] != quote:
        raise ValueError(f"no closing quote: {raw}")
    text = ""
    at = 0
    while at < len(inside):
        character = inside[at]
        if character == quote:
            raise ValueError(f"a quote within quotes: {raw}")
        if character == "\\":
            at += 1
            if at == len(inside) or inside[at] not in ESCAPES:
                raise ValueError(f"unknown escape: {raw}")
            character = ESCAPES[inside[at]]
        text += character
        at += 1
    return text


def split_list(inside):
    """The parts of a list, at commas outside of quotes and inner brackets. A comma at the end is allowed."""
    parts = [""]
    depth = 0
    quote = ""
    for character in inside:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    if not parts[-1].strip():
        parts.pop()
    return [part.strip() for part in parts]


def parse_value(raw):
    """The value that a raw text stands for. Raises ValueError."""
    if raw[:1] in ("'", '"'):
        return unquote(raw)
    if raw.startswith("["):
        if not raw.endswith("]"):
            raise ValueError(f"no closing bracket: {raw}")
        return [parse_value(part) for part in split_list(raw[1:-1])]
    if raw.lower() in WORDS:
        return WORDS[raw.lower()]
    digits = raw.replace("_", "")
    unsigned = digits[1:] if digits[:1] in ("+", "-") else digits
    if unsigned.isdigit():
        return int(digits)
    if unsigned.startswith("0x"):
        return int(digits, 16)
    whole, point, rest = unsigned.partition(".")
    if point and whole.isdigit() and rest.isdigit():
        return float(digits)
    return raw


def parse_duration(raw):
    """Seconds of a text such as `1h30m` or `250ms`. Raises ValueError."""
    seconds = Fraction(0)
    digits = unit = ""
    for character in raw + "0":
        if character.isdigit() and unit:
            if unit not in UNITS or not digits:
                raise ValueError(f"no duration: {raw}")
            seconds += int(digits) * UNITS[unit]
            digits = unit = ""
        if character.isdigit():
            digits += character
        else:
            unit += character
    if digits != "0" or seconds == 0:
        raise ValueError(f"no duration: {raw}")
    return seconds
