"""Patterns of paths.

`/users/<id>` matches one part, `<int:id>` a whole number, `<word:name>` letters, digits, `_` and `-`, `<path:rest>` one
or more parts. What stands in angle brackets is captured.
"""

from routes.query import decode, encode


class PatternError(ValueError):
    """The pattern cannot be read, or a value does not fit it."""


def _is_int(text):
    return text.isdigit() and text.isascii()


def _is_word(text):
    return bool(text) and all(character.isalnum() or character in "_-" for character in text)


KINDS = {"text": (bool, str), "int": (_is_int, int), "word": (_is_word, str), "path": (bool, str)}
WEIGHTS = {"literal": 4, "int": 3, "word": 2, "text": 1, "path": 0}


class Pattern:
    """One pattern. `parts` are tuples (kind, name); of kind `literal`, the name is the text itself."""

    def __init__(self, text):
        if not text.startswith("/"):
            raise PatternError(f"{text} does not start with /")
        self.text = text
        self.parts = [self._read(part) for part in text[1:].split("/")]
        names = self.names()
        if len(set(names)) < len(names):
            raise PatternError(f"{text} captures a name twice")
        if any(kind == "path" for kind, _ in self.parts[:-1]):
            raise PatternError(f"{text} goes on behind a path")

    def _read(self, part):
        if not part.startswith("<"):
            if "<" in part or ">" in part:
                raise PatternError(f"{part} is neither text nor a capture")
            return "literal", part
        inside = part[1:-1]
        kind, colon, name = inside.rpartition(":")
        kind = kind if colon else "text"
        if not part.endswith(">") or kind not in KINDS or not name.isidentifier():
            raise PatternError(f"{part} is no capture")
        return kind, name

    def names(self):
        """What is captured, in order."""
        return [name for kind, name in self.parts if kind != "literal"]

    def weight(self):
        """A tuple that is larger for the pattern that says more about its paths."""
        return tuple(WEIGHTS[kind] for kind, _ in self.parts)

    def match(self, path):
        """The captured values by name; None if the path does not fit."""
        if not path.startswith("/"):
            return None
        pieces = path[1:].split("/")
        captured = {}
        for index, (kind, name) in enumerate(self.parts):
            if index >= len(pieces):
                return None
            if kind == "path":
                rest = "/".join(pieces[index:])
                if not rest:
                    return None
                captured[name] = decode(rest)
                return captured
            piece = decode(pieces[index])
            if kind == "literal":
                if piece != name:
                    return None
                continue
            fits, convert = KINDS[kind]
            if not fits(piece):
                return None
            captured[name] = convert(piece)
        return captured if len(pieces) == len(self.parts) else None

    def build(self, values):
        """The path with these values filled in. Raises PatternError for a missing one or one that does not fit."""
        pieces = []
        for kind, name in self.parts:
            if kind == "literal":
                pieces.append(name)
                continue
            if name not in values:
                raise PatternError(f"{name} is missing")
            text = str(values[name])
            if not KINDS[kind][0](text):
                raise PatternError(f"{name} = {text} is no {kind}")
            pieces.append(encode(text, safe="/" if kind == "path" else ""))
        return "/" + "/".join(pieces)
