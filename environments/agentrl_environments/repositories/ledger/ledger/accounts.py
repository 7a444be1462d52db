"""One account."""

from ledger.errors import InsufficientFunds, LedgerError


class Account:
    """Entries (day, amount, text) in the order of their booking. The balance may not fall below `-overdraft`."""

    def __init__(self, name, overdraft=0):
        self.name = name
        self.overdraft = overdraft
        self.frozen = False
        self.entries = []

    @property
    def balance(self):
        """Sum of all entries."""
        return sum(amount for _, amount, _ in self.entries)

    def available(self):
        """How much can be taken out now."""
        return 0 if self.frozen else self.balance + self.overdraft

    def deposit(self, day, amount, text="deposit"):
        """Put money in. Raises LedgerError if the amount is not positive or the day lies before the last entry."""
        self._check(day, amount)
        self.entries.append((day, amount, text))

    def withdraw(self, day, amount, text="withdrawal"):
        """Take money out. Raises InsufficientFunds, LedgerError if the account is frozen, and as `deposit` does."""
        self._check(day, amount)
        if self.frozen:
            raise LedgerError(f"{self.name} is frozen")
        if amount > self.available():
            raise InsufficientFunds(self.name, amount - self.available())
        self.entries.append((day, -amount, text))

    def balance_on(self, day):
        """The balance at the end of a day."""
        return sum(amount for booked, amount, _ in self.entries if booked <= day)

    def lowest(self):
        """The lowest balance that there ever was, that of the empty account included."""
        lowest = balance = 0
        for _, amount, _ in self.entries:
            balance += amount
            lowest = min(lowest, balance)
        return lowest

    def _check(self, day, amount):
        if amount <= 0:
            raise LedgerError("the amount must be positive")
        if self.entries and day < self.entries[-1][0]:
            raise LedgerError("the day lies before the last entry")
