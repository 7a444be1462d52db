"""From values to text that reads as the same values."""

from iniconf.values import ESCAPES, parse_value


def write_value(value):
    """A value as raw text. Raises ValueError for one that has none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(write_value(item) for item in value) + "]"
    if isinstance(value, str):
        return value if _is_safe(value) else quote(value)
    raise ValueError(f"cannot write a {type(value).__name__}")


def quote(text):
    """The text between double quotes, with escapes."""
    names = {character: name for name, character in ESCAPES.items() if character != "'"}
    return '"' + "".join("\\" + names[character] if character in names else character for character in text) + '"'


def dumps(values):
    """Values by dotted name as a text with sections; what has no section stands first."""
    sections = {"": []}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {write_value(value)}")
    parts = []
    for section, lines in sections.items():
        if lines:
            parts.append("\n".join([f"[{section}]", *lines] if section else lines))
    return "\n\n".join(parts) + "\n" if parts else ""


def _is_safe(text):
    if not text or text != text.strip() or any(character in "#;,'\"[]\\\n\t=" for character in text):
        return False
    return parse_value(text) == text
