"""Breaking and shortening text."""


def wrap(text, width):
    """`text` as lines of at most `width` characters, broken at spaces; a longer word is cut. An empty text is one empty
    line. Line breaks of the text stay."""
    if width < 1:
        raise ValueError("width must be at least 1")
    lines = []
    for paragraph in text.split("\n"):
        lines.extend(_wrap_paragraph(paragraph, width))
    return lines


def _wrap_paragraph(paragraph, width):
    lines = []
    line = ""
    for word in paragraph.split():
        if line and len(line) + 1 + len(word) <= width:
            line = line + " " + word
            continue
        if line:
            lines.append(line)
        while len(word) > width:
            lines.append(word[:width])
            word = word[width:]
        line = word
    if line or not lines:
        lines.append(line)
    return lines


def shorten(text, width, mark="..."):
    """`text` if it fits into `width` characters, else as much of its start as fits before `mark`."""
    if len(text) <= width:
        return text
    if width <= len(mark):
        return mark[:width]
    return text[: width - len(mark)].rstrip() + mark
