"""What an answer with tools, or behind reasoning, must be, as the source of a grammar.

- A tool that must be called: calls in the model's form and nothing else, each tool's arguments under its schema.
- ``strict`` tools that may be called: any text, but behind the tag that begins a call only a call, under the schemas. Where
  calls have no tag (the llama form), a text that begins as a call must be one.
- An output that has a format of its own: that, or calls where tools may be called.

Reasoning, where the model does it, comes before all of these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from edgemesh.api.asking import offered
from edgemesh.api.calling_tags import SHARED_RULES, TaggedCall
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.grammar import LARK, MAX_SOURCE_CHARS, guided, unusable
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import Parsing
from edgemesh.api.reasoning import CLOSE as THOUGHT
from edgemesh.api.reasoning import OPEN as THINK
from edgemesh.api.resolve import Job
from edgemesh.api.tool_types import MAX_CALLS, Function, NamedTool, Tool, ToolForm
from edgemesh.api.tools import CLOSE, OPEN, PYTHON_TAG

_TOOLS: Final = "tools"
_TEXT: Final = r"TEXT: /(.|\n)*/"
_GAP: Final = r"GAP: /[ \n]{0,4}/"
_NO_CALL: Final = r'NO_CALL: /(.|\n)*/ & ~/[ \n]*\{[ \n]*"(name|type|id|arguments|parameters)"(.|\n)*/'
_NO_FUNCTION: Final = r"NO_FUNCTION: /(.|\n)*/ & ~/(.|\n)*<function=(.|\n)*/"
_ARGUMENTS: Final[dict[ToolForm, str]] = {"hermes": "arguments", "llama": "parameters"}


def with_calls(request: ChatRequest, job: Job, added: Collection[str]) -> Job:
    """The job with what its tools and its reasoning say of its choices' form, beside its output's own.

    ``added`` are the texts that are one token each, beside the tokenizer's own vocabulary. Raises ``ApiError`` (400) for a
    strict tool whose schema cannot be kept to.
    """
    return _kept(request, job, _Rules(job.parsing, added)) if job.parsing is not None else job


def _kept(request: ChatRequest, job: Job, rules: _Rules) -> Job:
    parsing, output, asked = rules.parsing, job.grammar, job.grammar_of
    tools = [tool for tool in offered(request) if tool.function.name in parsing.tools]
    forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    if output and not forced:
        # Where it is met behind other text, the trial of the whole does not come to it.
        rules.trials.append((asked, output))
    if not tools:
        source = rules.source("@output", output) if output and parsing.thinks else output
    elif forced:
        source, asked = rules.source(rules.calls(request, tools), ""), _TOOLS
    elif output and parsing.form == "llama":
        raise _ambiguous(asked)
    elif output:
        source, asked = rules.source(f"({rules.calls(request, tools)} | @output)", output), _TOOLS
    elif any(tool.function.strict for tool in tools):
        source, asked = rules.source(rules.any(request, tools), ""), _TOOLS
    else:
        return job
    if len(source) > MAX_SOURCE_CHARS:
        why = f"they come to {len(source)} characters; the most is {MAX_SOURCE_CHARS}"
        raise unusable(asked, why)
    return msgspec.structs.replace(job, grammar=source, grammar_of=asked, trials=tuple(rules.trials))


class _Rules:
    """The rules of one source, as they are needed."""

    def __init__(self, parsing: Parsing, added: Collection[str]) -> None:
        self.parsing = parsing
        self.trials: list[tuple[str, str]] = []
        """What to try out by itself: the parameter and its source."""

        self._added = added
        self._rules = [_TEXT, _GAP]
        self._tags = parsing.form != "llama"
        """Whether a call stands between tags."""

        self._coder = parsing.form == "qwen3_coder"
        """Whether its arguments do."""

    def source(self, start: str, output: str) -> str:
        """The whole source; ``@output`` of ``start`` is what the source ``output`` says."""
        if self.parsing.thinks:
            start = f"think {start}"
            thought = self._until("thought", THOUGHT)
            if self._tags:
                thought += " GAP"
            self._rules.append(
                f"think: {thought}" if self.parsing.opened else f"think: ({self._tag(THINK)} {thought})?"
            )
        text = LARK + "\n".join([f"start: {start}", *self._rules]) + "\n"
        if not output:
            return text
        named = json.loads(output)["grammars"][0] if output.startswith("{") else {"lark_grammar": output}
        return json.dumps({"grammars": [{"lark_grammar": text}, named | {"name": "output"}]})

    def calls(self, request: ChatRequest, tools: Sequence[Tool]) -> str:
        """One call, or several where several may come."""
        self._objects(request, tools)
        call, between = "object", '"; "'
        if self._tags:
            self._rules.append(f'call: {self._tag(OPEN)} "\\n" object "\\n" {self._tag(CLOSE)}')
            call, between = "call", r'"\n"'
        more = "" if self.parsing.most == 1 else f" ({between} {call}){{0,{MAX_CALLS - 1}}}"
        return f"({call}{more})"

    def any(self, request: ChatRequest, tools: Sequence[Tool]) -> str:
        """Any text, with calls in it."""
        self._objects(request, tools)
        if self._tags:
            text = "TEXT"
            if self._coder:
                # There a call may begin without the outer tag.
                self._rules.append(_NO_FUNCTION)
                text = "NO_FUNCTION"
            self._rules.append(f'call: {self._until("before", OPEN, text)} "\\n" object "\\n" {self._tag(CLOSE)}')
            return f"call* {text}"
        calls = f'object ("; " object){{0,{MAX_CALLS - 1}}}'
        self._rules.append(_NO_CALL)
        return f"({calls} | {self._until('before', PYTHON_TAG, 'NO_CALL')} {calls} | NO_CALL)"

    def _objects(self, request: ChatRequest, tools: Sequence[Tool]) -> None:
        """The object of a call: a name and arguments, tool by tool."""
        self._rules.append("object: " + " | ".join(f"object{number}" for number in range(len(tools))))
        places = {tool.function.name: place for place, tool in enumerate(request.tools or ())}
        if self._coder:
            self._rules += SHARED_RULES
        key = _ARGUMENTS.get(self.parsing.form, "")
        for number, tool in enumerate(tools):
            function = tool.function
            param = f"tools[{places[function.name]}].function.parameters"
            schema = _schema(function, param)
            self.trials.append((param, json.dumps({"grammars": [{"json_schema": schema}]})))
            if self._coder:
                self._rules += _tagged(number, function, schema, param)
                continue
            head = json.dumps(f'{{"name": "{function.name}", "{key}": ')
            if self.parsing.form == "llama":
                # Where a text may begin with a call, it may begin with blanks: both are told apart as one word.
                head = rf'/[ \n]{{0,4}}\{{"name": "{function.name}", "{key}": /'
            self._rules.append(f'object{number}: {head} arguments{number} "}}"')
            self._rules.append(f"arguments{number}: %json {json.dumps(schema)}")

    def _tag(self, tag: str) -> str:
        """A tag: a token of its own, or text."""
        return tag if tag in self._added else json.dumps(tag)

    def _until(self, rule: str, tag: str, text: str = "TEXT") -> str:
        """Any text of a kind up to a tag, and that."""
        if tag in self._added:
            return f"{text} {tag}"
        self._rules.append(f"{rule}[suffix={json.dumps(tag)}]: {text}")
        return rule


def _tagged(number: int, function: Function, schema: dict[str, Any], param: str) -> list[str]:
    """The rules of a call whose arguments have tags."""
    return list(TaggedCall(number, schema, param, strict=function.strict is True).rules(function.name))


def _schema(function: Function, param: str) -> dict[str, Any]:
    """What a call's arguments must be: of a tool that is not strict, its schema as far as that can be kept to."""
    given = function.parameters
    if given is None:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        return guided(given | {"type": "object"}, param)
    except ApiError:
        if function.strict:
            raise
        return guided({"type": "object"}, param)


def _ambiguous(asked: str) -> ApiError:
    message = (
        f"`{asked}` with `tools` is not served for this model, which writes calls as JSON alone, so that no output that"
        ' begins alike could be told from one; give `tool_choice` "none" or "required"'
    )
    return invalid(message, asked, "conflicting_constraints")
