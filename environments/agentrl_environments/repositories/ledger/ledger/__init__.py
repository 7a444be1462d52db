"""A bank's books."""

from ledger.accounts import Account
from ledger.bank import Bank
from ledger.errors import InsufficientFunds, LedgerError, UnknownAccount
from ledger.money import allocate, format_cents, parse_cents
from ledger.statement import monthly, statement

__all__ = [
    "Account",
    "Bank",
    "InsufficientFunds",
    "LedgerError",
    "UnknownAccount",
    "allocate",
    "format_cents",
    "monthly",
    "parse_cents",
    "statement",
]
