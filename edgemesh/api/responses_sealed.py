"""What a model thought, as text that a client keeps and sends back unread: ``encrypted_content``.

It is not encrypted, for it holds nothing that the answer does not say beside it, and nothing here depends on who wrote it;
it is only what clients that keep no other form of reasoning know how to keep.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from typing import Final

from edgemesh.api.errors import invalid

_MARK: Final = "edgemesh1."


def sealed(text: str) -> str:
    """The text in a form that ``unsealed`` reads."""
    return _MARK + urlsafe_b64encode(text.encode()).decode()


def unsealed(content: str, param: str) -> str:
    """The text again. Raises ``ApiError`` (400) for one that was not made by ``sealed``."""
    try:
        if content.startswith(_MARK):
            return b64decode(content.removeprefix(_MARK), b"-_", validate=True).decode()
    except ValueError:
        pass
    message = f"`{param}` was not made by this server, which cannot read it; leave it out, or the whole item"
    raise invalid(message, param, "invalid_value")
