"""What the bank refuses."""


class LedgerError(Exception):
    """Base of all refusals."""


class UnknownAccount(LedgerError):
    """There is no account of this name."""


class InsufficientFunds(LedgerError):
    """The account does not hold enough; `missing` cents are lacking."""

    def __init__(self, name, missing):
        super().__init__(f"{name} lacks {missing} cents")
        self.name = name
        self.missing = missing
