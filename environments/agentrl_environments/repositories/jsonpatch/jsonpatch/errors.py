"""What can be wrong with a pointer or a patch."""


class PatchError(Exception):
    """A patch cannot be applied."""


class PointerError(PatchError):
    """A pointer cannot be read, or leads to nothing."""


class TestFailed(PatchError):
    """A `test` operation found another value."""
