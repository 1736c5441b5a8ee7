"""One model's tokenizer and chat template, from the files beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from edgemesh.api.chat import ChatTemplate
from edgemesh.api.detokenize import Pieces, TokenizerFile
from edgemesh.api.dialect import ReasoningParser, ToolParser, dialect_of
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.extent import PART_CONTAINERS, PART_VALUES, within
from edgemesh.api.openai import ChatMessage
from edgemesh.api.parser import MARKS
from edgemesh.api.tool_types import Tool
from edgemesh.wire.ids import MAX_TOKENS

MAX_FILE_BYTES: Final = 256 << 20
MOST_TOKENS: Final = MAX_TOKENS
"""Tokens of one text: no model here reads more, and a list of them is made in one go."""


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    """What of ``tokenizer_config.json`` the template sees."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    sep_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    cls_token: str | dict[str, Any] | None = None
    mask_token: str | dict[str, Any] | None = None


class ModelText:
    """Text to token ids and back, for one model.

    ``tokenizer`` and ``config`` are the bytes of ``tokenizer.json`` and ``tokenizer_config.json`` (empty: there is
    none), ``template`` the text of ``chat_template.jinja`` where there is one. Raises ``ValueError`` for files that say
    nothing usable. The parsers' kinds are the topology's.
    """

    def __init__(
        self,
        tokenizer: bytes,
        config: bytes,
        template: str | None,
        *,
        clock: Callable[[], int],
        now: Callable[[], datetime],
        tool_parser: ToolParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> None:
        try:
            file = msgspec.json.decode(tokenizer, type=TokenizerFile)
            settings = msgspec.json.decode(config or b"{}", type=_TokenizerConfig)
            self.tokenizer = Tokenizer.from_buffer(tokenizer)
        except ValueError as error:
            message = f"the model's tokenizer files are not readable: {error}"
            raise ValueError(message) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.pieces = Pieces(self.tokenizer, file)
        self.marked_pieces = Pieces(self.tokenizer, file, MARKS)
        """The same, with the tags of reasoning and calls as text, be they special tokens or not."""

        self.added = frozenset(token.content for token in file.added_tokens)
        """Texts that are one token each, beside the vocabulary."""

        source = template if template is not None else _template(settings.chat_template)
        tokens = {
            name: token if isinstance(token, str) else str(token.get("content", ""))
            for name in settings.__struct_fields__
            if name.endswith("_token") and (token := getattr(settings, name)) is not None
        }
        self.source = source
        """The chat template's own text, where there is one."""

        self.special_tokens = tokens
        """Names of special tokens (``eos_token``) to their text."""

        self.template = None if source is None else ChatTemplate(source, tokens, clock=clock, now=now)
        self.dialect = dialect_of(self.template, tool_parser, reasoning_parser)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        kwargs: dict[str, Any] | None,
        documents: Sequence[dict[str, str]] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """A conversation as the model reads it. Raises ``ApiError``."""
        if self.template is None:
            message = "this model has no chat template; use /v1/completions"
            raise invalid(message, "messages", "no_chat_template")
        if tools and not within(msgspec.json.encode(tools), PART_VALUES, PART_CONTAINERS):
            message = f"`tools` hold more than {PART_VALUES} values or {PART_CONTAINERS} objects and arrays together"
            raise invalid(message, "tools", "too_many_values")
        return self.template.render(
            self.dialect.messages(messages, tools),
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs,
            documents=documents,
            continue_final_message=continue_final_message,
            tools=self.dialect.tools(tools),
        )

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of the text that ``param`` gave. Raises ``ApiError`` where the tokenizer cannot read it."""
        try:
            # Of the tokenizer's calls only those for batches let go of the interpreter's lock while they work.
            (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:
            raise _unreadable(error, param) from error
        if len(encoded) > MOST_TOKENS:
            message = f"`{param}` makes {len(encoded)} tokens; the most of one text is {MOST_TOKENS}"
            raise invalid(message, param, "too_many_tokens")
        return encoded.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        (text,) = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text


def _template(given: str | list[_NamedTemplate] | None) -> str | None:
    if not isinstance(given, list):
        return given
    named = {each.name: each.template for each in given}
    return named.get("default")


def _unreadable(error: Exception, param: str) -> ApiError:
    message = f"the tokenizer cannot read this text: {error}"[:500]
    return invalid(message, param)
