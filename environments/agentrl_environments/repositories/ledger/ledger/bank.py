"""Accounts that belong together."""

from ledger.accounts import Account
from ledger.errors import LedgerError, UnknownAccount
from ledger.money import allocate, interest


class Bank:
    """Accounts by name."""

    def __init__(self):
        self._accounts = {}

    def open(self, name, overdraft=0):
        """A new account. Raises LedgerError if the name is taken."""
        if name in self._accounts:
            raise LedgerError(f"{name} is taken")
        self._accounts[name] = Account(name, overdraft)
        return self._accounts[name]

    def account(self, name):
        """The account of a name. Raises UnknownAccount."""
        if name not in self._accounts:
            raise UnknownAccount(name)
        return self._accounts[name]

    def close(self, name):
        """Close an account. Raises LedgerError unless its balance is zero."""
        if self.account(name).balance != 0:
            raise LedgerError(f"{name} is not empty")
        del self._accounts[name]

    def total(self):
        """Sum of all balances."""
        return sum(account.balance for account in self._accounts.values())

    def balances(self):
        """Balances by name, in the order of the names."""
        return {name: self._accounts[name].balance for name in sorted(self._accounts)}

    def transaction(self):
        """A context in which all bookings count only if no exception leaves it."""
        return Transaction(self)

    def transfer(self, day, source, target, amount):
        """Move money from account to account, as a whole or not at all."""
        if source == target:
            raise LedgerError("source and target are the same")
        with self.transaction():
            self.account(source).withdraw(day, amount, f"to {target}")
            self.account(target).deposit(day, amount, f"from {source}")

    def distribute(self, day, source, targets, amount):
        """Move an amount to several accounts by weight, as a whole or not at all. `targets` maps names to weights; who
        would get nothing is left out."""
        shares = allocate(amount, list(targets.values()))
        with self.transaction():
            for target, share in zip(targets, shares):
                if share:
                    self.transfer(day, source, target, share)

    def pay_interest(self, day, rate, days):
        """Pay interest to every account with a positive balance; the sum of what was paid."""
        paid = 0
        for name in sorted(self._accounts):
            account = self._accounts[name]
            amount = interest(max(0, account.balance), rate, days)
            if amount > 0:
                account.deposit(day, amount, "interest")
                paid += amount
        return paid


class Transaction:
    """Puts the entries of all accounts back if an exception leaves it. May be nested."""

    def __init__(self, bank):
        self._bank = bank
        self._saved = {}

    def __enter__(self):
        self._saved = {name: list(account.entries) for name, account in self._bank._accounts.items()}
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            for name, entries in self._saved.items():
                self._bank.account(name).entries = entries
        return False
