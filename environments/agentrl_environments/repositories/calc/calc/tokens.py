"""From characters to tokens: tuples (kind, text, position), kinds `number`, `name`, `operator` and `end`."""

from calc.errors import ParseError

OPERATORS = "+-*/%^(),="


def tokenize(text):
    """The tokens of `text`, the last one of kind `end`. Raises ParseError for a character that means nothing."""
    tokens = []
    position = 0
    while position < len(text):
        character = text[position]
        if character.isspace():
            position += 1
        elif character.isdigit():
            end = _end_of_number(text, position)
            tokens.append(("number", text[position:end], position))
            position = end
        elif character.isalpha() or character == "_":
            end = _end_of_name(text, position)
            tokens.append(("name", text[position:end], position))
            position = end
        elif character in OPERATORS:
            tokens.append(("operator", character, position))
            position += 1
        else:
            raise ParseError(f"unknown character {character!r}", position)
    tokens.append(("end", "", len(text)))
    return tokens


def _end_of_number(text, position):
    """Digits, and at most one point with digits behind it."""
    end = position
    while end < len(text) and text[end].isdigit():
        end += 1
    if end + 1 < len(text) and text[end] == "." and text[end + 1].isdigit():
        end += 1
        while end < len(text) and text[end].isdigit():
            end += 1
    return end


def _end_of_name(text, position):
    end = position
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    return end
