"""What can be wrong with an expression."""


class CalcError(Exception):
    """Base of all errors here."""


class ParseError(CalcError):
    """The text is no expression; `position` counts its characters from 0."""

    def __init__(self, message, position):
        super().__init__(f"{message} at {position}")
        self.position = position


class EvaluationError(CalcError):
    """The expression has no value."""
