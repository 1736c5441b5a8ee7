"""Text from elsewhere, made safe for a terminal."""


def plain(value: object) -> str:
    """A text without control characters: those are written as escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
