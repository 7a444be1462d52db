"""Pointers such as `/users/0/name`."""

from jsonpatch.errors import PointerError


class Pointer:
    """A path into a document: `parts` are names or positions as text. The pointer `` is the whole document."""

    def __init__(self, text):
        if text and not text.startswith("/"):
            raise PointerError(f"{text} does not start with /")
        self.text = text
        self.parts = [unescape(part) for part in text.split("/")[1:]]

    @classmethod
    def of(cls, parts):
        """The pointer of these names and positions."""
        return cls("".join("/" + escape(str(part)) for part in parts))

    def parent(self):
        """The pointer one step up. Raises PointerError for the whole document."""
        if not self.parts:
            raise PointerError("the document has no parent")
        return Pointer.of(self.parts[:-1])

    def holds(self, other):
        """Whether `other` leads to this place or into it."""
        return other.parts[: len(self.parts)] == self.parts

    def get(self, document):
        """The value that the pointer leads to. Raises PointerError."""
        for depth, part in enumerate(self.parts):
            document = self._step(document, part, depth)
        return document

    def _step(self, value, part, depth):
        if isinstance(value, dict) and part in value:
            return value[part]
        if isinstance(value, list):
            index = position(part, len(value))
            if index < len(value):
                return value[index]
        place = Pointer.of(self.parts[: depth + 1]).text
        raise PointerError(f"nothing at {place}")


def escape(part):
    """A name as part of a pointer: `~` and `/` are written `~0` and `~1`."""
    return part.replace("~", "~0").replace("/", "~1")


def unescape(part):
    """The name that a part of a pointer stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def position(part, length):
    """The position in a list that a part names; `-` is the one behind its end. Raises PointerError."""
    if part == "-":
        return length
    if not part.isdigit() or (len(part) > 1 and part.startswith("0")):
        raise PointerError(f"{part} is no position in a list")
    return int(part)


def find(document, wanted):
    """Pointers, as text, to all places that hold the value `wanted`, in the order of the document."""
    found = []

    def visit(value, parts):
        if same(value, wanted):
            found.append(Pointer.of(parts).text)
        for part, inner in children(value):
            visit(inner, [*parts, part])

    visit(document, [])
    return found


def children(value):
    """Pairs of name or position, and value, of what a value holds."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return list(enumerate(value))
    return []


def same(one, other):
    """Whether two values are equal as JSON: true is not 1, but 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    return one == other
