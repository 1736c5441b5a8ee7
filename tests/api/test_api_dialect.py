"""Tools through a model's own chat template where it knows them, described by the server where it does not."""

import json
import warnings

import pytest
from api_tokenizers import byte_level, config_of, load, model_text, qwen3_directory, smollm2_directory
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.dialect import Dialect
from edgemesh.api.errors import ApiError
from edgemesh.api.events import gather
from edgemesh.api.openai import ChatMessage
from edgemesh.api.parser import MessageParser, Parsing
from edgemesh.api.tool_prompt import written
from edgemesh.api.tool_types import Function, FunctionCall, Tool, ToolCall

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <b>"}},
    "required": ["city"],
}
TOOLS = [
    Tool("function", Function("get_weather", "The weather.", SCHEMA, strict=True)),
    Tool("function", Function("now")),
]
PLAIN_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
LLAMA = """{{- bos_token }}{% if tools is not none %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Answer with {"name": function name, "parameters": dictionary of its arguments}.\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}}{{ '<|eot_id|>' }}
{%- elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}"""
JOINS = """{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}
{{- m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}
{%- endfor %}"""
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}{% endfor %}"""


def call(arguments='{"city": "Köln"}', name="get_weather", number=1):
    return ToolCall(id=f"call_{number}", function=FunctionCall(name, arguments))


def turns(*calls, content=None, reasoning=None):
    return [
        ChatMessage(role="user", content="q"),
        ChatMessage(role="assistant", content=content, tool_calls=list(calls), reasoning=reasoning),
        *[ChatMessage(role="tool", tool_call_id=each.id, content=f"answer {each.id}") for each in calls],
    ]


def with_template(source, **settings):
    return model_text(byte_level().tokenizer, json.dumps({"bos_token": "<s>"}).encode(), source, **settings)


@pytest.fixture(scope="module")
def qwen3():
    directory = qwen3_directory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), chat_template=config_of(directory)["chat_template"]
        )
    return load(directory), theirs


def test_qwen3_tells_of_tools_and_thinks(qwen3):
    assert qwen3[0].dialect == Dialect(form="hermes", native=True, system=True, thinks=True, efforts=True)


TEXTS = st.text("ab <>\"'é\n{}\\", max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    arguments=st.lists(
        st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS, max_size=2)), min_size=1, max_size=3
    ),
    content=TEXTS,
    thought=st.none() | TEXTS,
    system=st.booleans(),
    again=st.booleans(),
)
def test_calls_and_answers_render_as_transformers_renders_them(qwen3, arguments, content, thought, system, again):
    """Which has a call's arguments as an object, where clients send its text."""
    ours, theirs = qwen3
    calls = [call(json.dumps(each), number=number) for number, each in enumerate(arguments)]
    messages = turns(*calls, content=content, reasoning=thought)
    plain = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": each.id, "type": "function", "function": {"name": "get_weather", "arguments": given}}
                for each, given in zip(calls, arguments, strict=True)
            ],
        }
        | ({} if thought is None else {"reasoning_content": thought}),
        *[{"role": "tool", "tool_call_id": each.id, "content": f"answer {each.id}"} for each in calls],
    ]
    if system:
        messages = [ChatMessage(role="system", content="s"), *messages]
        plain = [{"role": "system", "content": "s"}, *plain]
    if again:
        messages = [*messages, ChatMessage(role="user", content="and?")]
        plain = [*plain, {"role": "user", "content": "and?"}]
    expected = theirs.apply_chat_template(plain, tools=PLAIN_TOOLS, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages, add_generation_prompt=True, kwargs=None, tools=TOOLS) == expected


def test_an_assistant_that_only_calls_has_no_text(qwen3):
    rendered = qwen3[0].render(turns(call()), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in rendered
    assert "None" not in rendered


def test_arguments_that_are_no_object_stay_text(qwen3):
    rendered = qwen3[0].render(turns(call("{oops")), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert '"arguments": {oops}' in rendered


def test_llama_templates_call_in_their_own_form():
    text = with_template(LLAMA)
    assert text.dialect == Dialect(form="llama", native=True, system=True, thinks=False)
    rendered = text.render(turns(call()), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert '{"name": "get_weather", "parameters": {"city": "Köln"}}<|eot_id|>' in rendered
    assert "ipython<|end_header_id|>\n\nanswer call_1" in rendered
    with pytest.raises(ApiError) as caught:
        text.render(turns(call(), call(number=2)), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert (caught.value.status, "one call at once" in str(caught.value)) == (422, True)


def test_a_template_that_joins_arguments_to_text_gets_text():
    text = with_template(JOINS)
    assert text.dialect.native
    rendered = text.render(turns(call('{"a":  1}'), content="c"), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert 'assistant:cget_weather{"a":  1}tool:answer call_1' in rendered


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_template_without_tools_has_them_described(form):
    directory = smollm2_directory()
    files = (directory / "tokenizer.json").read_bytes(), (directory / "tokenizer_config.json").read_bytes()
    text = model_text(*files, tool_parser="auto" if form == "hermes" else form)
    assert text.dialect == Dialect(form=form, native=False, system=True, thinks=False)
    messages = [ChatMessage(role="system", content="Be brief."), *turns(call(), call("{}", "now", 2), content="Well.")]
    rendered = text.render(messages, add_generation_prompt=True, kwargs=None, tools=TOOLS)
    system, user, assistant, answers, _ = rendered.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == PLAIN_TOOLS
    assert user == "<|im_start|>user\nq"
    said = [written(each.function, form) for each in messages[2].tool_calls]
    assert assistant == "<|im_start|>assistant\nWell.\n" + "\n".join(said)
    assert answers == "<|im_start|>user\n" + "\n".join(
        f"<tool_response>\nanswer call_{number}\n</tool_response>" for number in (1, 2)
    )
    # What the server writes for the model is what it reads from it.
    parser = MessageParser(Parsing(form=form, tools=frozenset({"get_weather", "now"})), lambda: "c")
    message = gather([*parser.feed("\n".join(said)), *parser.finish()])
    assert [each.function for each in message.calls] == [each.function for each in messages[2].tool_calls]


def test_without_a_system_message_the_tools_make_one():
    text = load(smollm2_directory())
    rendered = text.render(
        [ChatMessage(role="user", content="q")], add_generation_prompt=False, kwargs=None, tools=TOOLS
    )
    assert rendered.startswith("<|im_start|>system\n# Tools")
    assert (
        text.render([ChatMessage(role="user", content="q")], add_generation_prompt=False, kwargs=None).count("Tools")
        == 0
    )


def test_without_a_system_role_the_first_user_is_told():
    text = with_template(NO_SYSTEM)
    assert text.dialect == Dialect(form="hermes", native=False, system=False, thinks=False)
    rendered = text.render(turns(call()), add_generation_prompt=False, kwargs=None, tools=TOOLS)
    assert rendered.startswith("[user]# Tools")
    assert "\n\nq[assistant]<tool_call>" in rendered


@pytest.mark.parametrize(
    ("source", "settings", "form", "native", "thinks"),
    [
        (JOINS, {"tool_parser": "llama"}, "llama", False, False),
        (JOINS, {"tool_parser": "none"}, None, False, False),
        (JOINS + "{# <tool_call><function= #}", {}, "qwen3_coder", True, False),
        (JOINS + "{# <think> #}", {}, "hermes", True, True),
        (JOINS + "{# <think> #}", {"reasoning_parser": "none"}, "hermes", True, False),
        (NO_SYSTEM, {"reasoning_parser": "think"}, "hermes", False, True),
    ],
)
def test_the_topology_says_what_a_template_does_not(source, settings, form, native, thinks):
    dialect = with_template(source, **settings).dialect
    assert (dialect.form, dialect.native, dialect.thinks) == (form, native, thinks)


def test_without_a_template_there_are_no_ways():
    assert byte_level().dialect == Dialect()
