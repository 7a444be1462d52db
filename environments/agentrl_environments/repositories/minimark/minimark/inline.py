"""What stands within a line: `code`, *emphasis*, **strong**, [links](url), backslashes.

Spans are tuples: ("text", text), ("code", text), ("em", spans), ("strong", spans), ("link", spans, url).
"""

SPECIAL = "\\`*_[]()#-+.!>"
ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def parse_inline(text):
    """The spans of a text."""
    spans = []
    plain = ""
    at = 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in SPECIAL:
            plain += text[at + 1]
            at += 2
            continue
        found = _span_at(text, at)
        if found is None:
            plain += text[at]
            at += 1
            continue
        span, at = found
        if plain:
            spans.append(("text", plain))
            plain = ""
        spans.append(span)
    if plain:
        spans.append(("text", plain))
    return spans


def _span_at(text, at):
    """The span that starts here and the place behind it; None if none does."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return None if end < 0 else (("code", text[at + 1 : end]), end + 1)
    if text.startswith("**", at):
        end = text.find("**", at + 2)
        if end > at + 2 and not text[at + 2].isspace():
            return ("strong", parse_inline(text[at + 2 : end])), end + 2
        return None
    if text[at] in "*_":
        end = text.find(text[at], at + 1)
        if end > at + 1 and not text[at + 1].isspace() and not text[end - 1].isspace():
            return ("em", parse_inline(text[at + 1 : end])), end + 1
        return None
    if text[at] == "[":
        return _link_at(text, at)
    return None


def _link_at(text, at):
    depth = 0
    for end in range(at, len(text)):
        if text[end] == "[":
            depth += 1
        elif text[end] == "]":
            depth -= 1
            if depth == 0:
                break
    else:
        return None
    if not text.startswith("(", end + 1):
        return None
    close = text.find(")", end + 2)
    if close < 0:
        return None
    return ("link", parse_inline(text[at + 1 : end]), text[end + 2 : close].strip()), close + 1


def escape(text):
    """The text with what HTML would read as markup written as entities."""
    return "".join(ESCAPED.get(character, character) for character in text)


def is_safe(url):
    """Whether a link may lead there: a relative address, or http, https or mailto."""
    scheme, colon, _ = url.partition(":")
    if not colon or "/" in scheme or "#" in scheme or "?" in scheme:
        return True
    return scheme.strip().lower() in ("http", "https", "mailto")


def inline_html(text):
    """A text as HTML. A link that is not safe becomes its text."""
    return "".join(_html(span) for span in parse_inline(text))


def _html(span):
    kind = span[0]
    if kind == "text":
        return escape(span[1])
    if kind == "code":
        return f"<code>{escape(span[1])}</code>"
    inside = "".join(_html(inner) for inner in span[1])
    if kind != "link":
        return f"<{kind}>{inside}</{kind}>"
    return f'<a href="{escape(span[2])}">{inside}</a>' if is_safe(span[2]) else inside


def inline_text(text):
    """A text without its marks."""
    return "".join(_text(span) for span in parse_inline(text))


def _text(span):
    return span[1] if span[0] in ("text", "code") else "".join(_text(inner) for inner in span[1])
