"""From text to (section, key, raw value, line number)."""

from iniconf.errors import SyntaxFault


def strip_comment(line):
    """The line up to a `#` or `;` outside of quotes, without spaces around."""
    quote = ""
    for at, character in enumerate(line):
        if quote:
            if character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "#;":
            return line[:at].strip()
    return line.strip()


def join_lines(text):
    """Pairs of line number and line; a line that ends in a backslash goes on in the next one."""
    joined = []
    start, held = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not held:
            start = number
        if line.endswith("\\"):
            held += line[:-1].rstrip() + " "
            continue
        joined.append((start, (held + line.lstrip()) if held else line))
        held = ""
    if held:
        joined.append((start, held))
    return joined


def is_name(text):
    """Whether the text may name a section or a key: letters, digits, `_` and `-`, a letter first; parts of a section's
    name are joined by points."""
    parts = text.split(".")
    return all(part[:1].isalpha() and part.replace("_", "").replace("-", "").isalnum() for part in parts)


def settings(text):
    """All settings, in order. Raises SyntaxFault."""
    section = ""
    found = []
    for number, line in join_lines(text):
        line = strip_comment(line)
        if not line:
            continue
        if line.startswith("["):
            section = line[1:-1].strip()
            if not line.endswith("]") or not is_name(section):
                raise SyntaxFault(f"no section: {line}", number)
            continue
        key, equals, raw = line.partition("=")
        key = key.strip()
        if not equals:
            raise SyntaxFault("expected key = value", number)
        if not is_name(key) or "." in key:
            raise SyntaxFault(f"no key: {key}", number)
        found.append((section, key, raw.strip(), number))
    return found
