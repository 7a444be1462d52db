"""From tokens to a tree of tuples.

    ("number", "1.5")    ("name", "x")    ("negate", tree)    ("call", name, [trees])
    ("binary", operator, left, right)     ("assign", name, tree)

From weak to strong: `=`, then `+ -`, then `* / %`, then a sign, then `^`, which binds to the right.
"""

from calc.errors import ParseError
from calc.tokens import tokenize

STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}


class Parser:
    """Reads the tokens of one expression from left to right."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.at = 0

    def peek(self):
        """The next token."""
        return self.tokens[self.at]

    def take(self):
        """The next token, which is read with this."""
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, operator):
        """Read `operator` if it comes next; whether it did."""
        kind, text, _ = self.peek()
        if kind == "operator" and text == operator:
            self.at += 1
            return True
        return False

    def expect(self, operator):
        """Read `operator`. Raises ParseError if something else comes next."""
        if not self.accept(operator):
            raise ParseError(f"expected {operator!r}", self.peek()[2])

    def statement(self):
        """`name = expression`, or an expression."""
        if self.peek()[0] == "name" and self.tokens[self.at + 1][:2] == ("operator", "="):
            name = self.take()[1]
            self.expect("=")
            return ("assign", name, self.statement())
        return self.binary(1)

    def binary(self, strength):
        """Operators of at least this strength, bound to the left."""
        left = self.signed()
        while True:
            kind, operator, _ = self.peek()
            found = STRENGTH.get(operator, 0) if kind == "operator" else 0
            if found < strength or found == 0:
                return left
            self.take()
            left = ("binary", operator, left, self.binary(found + 1))

    def signed(self):
        """A sign in front of a power binds weaker than the power."""
        if self.accept("-"):
            return ("negate", self.signed())
        if self.accept("+"):
            return self.signed()
        return self.power()

    def power(self):
        """`^` binds to the right."""
        base = self.atom()
        if self.accept("^"):
            return ("binary", "^", base, self.signed())
        return base

    def atom(self):
        """A number, a name, a call, or an expression in parentheses."""
        kind, text, position = self.take()
        if kind == "number":
            return ("number", text)
        if kind == "name":
            if self.accept("("):
                return ("call", text, self.arguments())
            return ("name", text)
        if (kind, text) == ("operator", "("):
            inside = self.binary(1)
            self.expect(")")
            return inside
        raise ParseError("expected a value", position)

    def arguments(self):
        """What stands between the parentheses of a call."""
        found = []
        if self.accept(")"):
            return found
        found.append(self.binary(1))
        while self.accept(","):
            found.append(self.binary(1))
        self.expect(")")
        return found


def parse(text):
    """The tree of `text`. Raises ParseError."""
    parser = Parser(tokenize(text))
    tree = parser.statement()
    kind, _, position = parser.peek()
    if kind != "end":
        raise ParseError("expected the end", position)
    return tree


def show(tree):
    """The tree as text, with parentheses around everything that has parts."""
    kind = tree[0]
    if kind in ("number", "name"):
        return tree[1]
    if kind == "negate":
        return f"(-{show(tree[1])})"
    if kind == "call":
        return f"{tree[1]}({', '.join(show(part) for part in tree[2])})"
    if kind == "assign":
        return f"{tree[1]} = {show(tree[2])}"
    return f"({show(tree[2])} {tree[1]} {show(tree[3])})"
