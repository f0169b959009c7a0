"""Text that others have written, made safe to print."""

_ESCAPED = [*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED += range(0xD800, 0xE000)  # control, direction and end of line; halves of characters, which have no encoding
_FORMS = {code: chr(code).encode("unicode_escape").decode() for code in _ESCAPED}
_FORMS |= {code: chr(0x2400 + code) for code in range(0x20)} | {0x0A: "␊\n", 0x7F: "␡"}

_WITHIN_LINES = {code: form for code, form in _FORMS.items() if code not in (0x09, 0x0A)}


def visible(text: str) -> str:
    """The text with what a terminal would obey in a form that it shows: ␛ for an escape, ␊ before an end of line."""
    return text.translate(_FORMS)


def printable(text: str) -> str:
    """As `visible`, with lines and tabs as they are: for our own sentences, whatever they quote."""
    return text.translate(_WITHIN_LINES)
