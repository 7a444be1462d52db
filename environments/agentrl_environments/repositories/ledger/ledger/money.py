"""Amounts of money as whole cents."""


def parse_cents(text):
    """Cents of a text such as `12`, `-3.50` or `1,234.5`. Raises ValueError."""
    cleaned = text.strip().replace(",", "")
    negative = cleaned.startswith("-")
    whole, point, cents = cleaned.removeprefix("-").partition(".")
    if not whole.isdigit() or (point and not (cents.isdigit() and len(cents) <= 2)):
        raise ValueError(f"no amount: {text}")
    amount = int(whole) * 100 + int(cents.ljust(2, "0") or "0")
    return -amount if negative else amount


def format_cents(amount):
    """An amount as text with two decimals, thousands marked by commas."""
    sign = "-" if amount < 0 else ""
    return f"{sign}{abs(amount) // 100:,}.{abs(amount) % 100:02d}"


def allocate(amount, weights):
    """Split an amount by weights so that nothing is lost: what is left over goes cent by cent to the first parts with a
    weight. Raises ValueError if there are no weights, a negative one, or only zeros."""
    whole = sum(weights)
    if whole <= 0 or any(weight < 0 for weight in weights):
        raise ValueError("weights must not be negative, and not all zero")
    parts = [amount * weight // whole for weight in weights]
    left = amount - sum(parts)
    for index, weight in enumerate(weights):
        if left == 0:
            break
        if weight:
            parts[index] += 1
            left -= 1
    return parts


def interest(amount, rate, days):
    """Simple interest for some days of a year of 365, `rate` in hundredths of a percent; rounded down to cents."""
    return amount * rate * days // (10000 * 365)
