"""Percent signs and what follows the question mark."""

SAFE = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~"
HEX = "0123456789abcdefABCDEF"


def encode(text, safe=""):
    """The text with all but letters, digits, `-._~` and the characters of `safe` as `%XX` of their UTF-8 bytes."""
    encoded = ""
    for character in text:
        if character in SAFE or character in safe:
            encoded += character
        else:
            encoded += "".join(f"%{byte:02X}" for byte in character.encode())
    return encoded


def decode(text, plus=False):
    """The text with `%XX` read; with `plus`, a plus sign is a space. A percent sign without two hexadecimal digits
    stays; bytes that are no UTF-8 become U+FFFD."""
    data = bytearray()
    at = 0
    while at < len(text):
        digits = text[at + 1 : at + 3]
        if text[at] == "%" and len(digits) == 2 and all(digit in HEX for digit in digits):
            data.append(int(digits, 16))
            at += 3
            continue
        character = " " if plus and text[at] == "+" else text[at]
        data.extend(character.encode())
        at += 1
    return data.decode("utf-8", "replace")


def parse_query(query):
    """The values of a query by name, in lists; a name without `=` has an empty value, parts without a name are left
    out."""
    values = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name:
            values.setdefault(decode(name, plus=True), []).append(decode(value, plus=True))
    return values


def write_query(values):
    """The query of values by name; lists give several, None gives none."""
    parts = []
    for name, value in values.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not None:
                parts.append(f"{encode(name)}={encode(str(item))}")
    return "&".join(parts)


def split_url(url):
    """Path, query and fragment of a URL without host."""
    rest, _, fragment = url.partition("#")
    path, _, query = rest.partition("?")
    return path, query, fragment
