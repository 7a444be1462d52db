"""What an account's owner gets to read. Days are numbers such as 20240131."""

from ledger.money import format_cents


def statement(account, first, last):
    """Lines of text: the balance before, each entry from day `first` to day `last` with the balance after it, and the
    balance at the end."""
    balance = account.balance_on(first - 1)
    lines = [f"opening {format_cents(balance)}"]
    for day, amount, text in account.entries:
        if first <= day <= last:
            balance += amount
            lines.append(f"{show_day(day)} {text} {format_cents(amount)} {format_cents(balance)}")
    lines.append(f"closing {format_cents(balance)}")
    return lines


def show_day(day):
    """20240131 as 2024-01-31."""
    return f"{day // 10000:04d}-{day // 100 % 100:02d}-{day % 100:02d}"


def monthly(account):
    """Money in and out by month: {202401: (in, out)}, both positive, only months with entries."""
    months = {}
    for day, amount, _ in account.entries:
        money_in, money_out = months.get(day // 100, (0, 0))
        if amount > 0:
            money_in += amount
        else:
            money_out -= amount
        months[day // 100] = (money_in, money_out)
    return months


def largest(account, count=3):
    """The entries that moved most, either way; of equal ones the earlier first."""
    return sorted(account.entries, key=lambda entry: -abs(entry[1]))[:count]
