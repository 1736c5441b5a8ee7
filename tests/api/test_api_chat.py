import itertools
import json
import warnings
from datetime import datetime

import msgspec
import pytest
from api_tokenizers import config_of, load, qwen3_directory, smollm2_directory
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.chat import ChatTemplate
from edgemesh.api.errors import ApiError
from edgemesh.api.openai import ChatMessage, ContentPart

USER = [ChatMessage(role="user", content="hi")]
TEXTS = st.text("ab <>&\"'é🎉\n\t{}%", max_size=20)
REAL = {"smollm2": smollm2_directory, "qwen3": qwen3_directory}


def template(source, tick=0, **tokens):
    clock = itertools.count(0, tick)
    return ChatTemplate(source, tokens, clock=lambda: next(clock), now=lambda: datetime(2026, 2, 3))  # noqa: DTZ001


@pytest.fixture(scope="module", params=REAL)
def both(request):
    """Our rendering and transformers', of one real model."""
    directory = REAL[request.param]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        config = config_of(directory)
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=config["chat_template"],
            **{name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        )
    return load(directory), theirs


ROLES = st.sampled_from(["system", "user", "assistant"])


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6),
    prompt=st.booleans(),
    thinking=st.none() | st.booleans(),
)
def test_conversations_render_as_transformers_renders_them(both, turns, prompt, thinking):
    ours, theirs = both
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    plain = [{"role": role, "content": text} for role, text in turns]
    expected = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt, **kwargs)
    messages = [ChatMessage(role=role, content=text) for role, text in turns]
    assert ours.render(messages, add_generation_prompt=prompt, kwargs=kwargs) == expected


def test_reasoning_of_earlier_turns_reaches_the_template(both):
    ours, theirs = both
    turns = [("user", "q", None), ("assistant", "a", "because")]
    plain = [{"role": r, "content": c} | ({"reasoning_content": t} if t else {}) for r, c, t in turns]
    messages = [ChatMessage(role=r, content=c, reasoning_content=t) for r, c, t in turns]
    expected = theirs.apply_chat_template(plain, tokenize=False)
    assert ours.render(messages, add_generation_prompt=False, kwargs=None) == expected


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(ROLES, TEXTS), max_size=3), last=st.text("ab <>&é🎉", min_size=1, max_size=12))
def test_a_message_is_continued_where_its_text_ends(both, turns, last):
    ours, theirs = both
    last = "x" + last.strip()
    plain = [{"role": role, "content": text} for role, text in [*turns, ("user", "q"), ("assistant", last)]]
    expected = theirs.apply_chat_template(plain, tokenize=False, continue_final_message=True)
    messages = [ChatMessage(**each) for each in plain]
    found = ours.render(messages, add_generation_prompt=False, kwargs=None, continue_final_message=True)
    assert found == expected
    assert found.endswith(last)


def test_the_blanks_and_parts_of_a_continued_message_are_kept():
    parts = ChatMessage(role="assistant", content=[ContentPart(type="text", text=each) for each in ("a", "b ")])
    made = template("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ add_generation_prompt }}")
    assert made.render([*USER, parts], continue_final_message=True) == "[hi][a\nb "


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    with pytest.raises(ApiError) as caught:
        template("{{ messages[0].role }}").render(USER, continue_final_message=True)
    assert (caught.value.status, caught.value.detail.param) == (400, "continue_final_message")


def test_documents_reach_a_template_that_reads_them_and_are_refused_by_others():
    given = [{"title": "t", "text": "one"}, {"title": "u", "text": "two"}]
    reader = template("{% if documents %}{% for d in documents %}{{ d.title }}={{ d.text }} {% endfor %}{% endif %}")
    assert reader.render(USER, documents=given) == "t=one u=two "
    assert reader.render(USER) == reader.render(USER, documents=[]) == ""
    with pytest.raises(ApiError) as caught:
        template("{{ messages[0].content }}").render(USER, documents=given)
    assert (caught.value.status, caught.value.detail.param) == (400, "documents")


BLOCKS = """\
  {% if true %}
    {%- for message in messages %}
      {{ message.role }}: {{ message | tojson }}|{{ [1, 2] | tojson(indent=2) }}
      {%- if loop.index == 2 %}{% break %}{% endif %}
    {% endfor %}
  {% endif %}
{% generation %}told{% endgeneration %}
{{ strftime_now('%Y') | length }}{{ bos_token }}{{ tools is none }}{{ documents is none }}{% set x = namespace(n=1) %}
{% set x.n = x.n + 1 %}{{ x.n }}"""


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_filters_and_globals_are_those_of_transformers(count):
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{"role": "user", "content": "<é> & '\"'"}] * count
    [expected], _ = render_jinja_template([plain], chat_template=BLOCKS, bos_token="<s>")
    ours = template(BLOCKS, bos_token="<s>").render(
        [ChatMessage(**each) for each in plain], add_generation_prompt=False
    )
    assert ours == expected


def test_parts_of_text_are_joined_and_developers_are_system():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [
        ChatMessage(role="developer", content="d"),
        ChatMessage(role="user", content=[ContentPart("text", "a"), ContentPart("text", "b")]),
    ]
    assert template(source).render(messages) == "[system]d[user]a\nb"


ALTERNATING = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system is first') }}
{%- endif %}{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        ("sdudu", "[system]0\n\n1[user]2\n\n3\n\n4"),
        ("usau", "[user]0\n\n1[assistant]2[user]3"),
        ("suad", "[system]0[user]1[assistant]2[user]3"),
        ("ua", "[user]0[assistant]1"),
    ],
)
def test_a_template_that_wants_fewer_turns_gets_them(turns, shown):
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [ChatMessage(role=roles[turn], content=str(at)) for at, turn in enumerate(turns)]
    assert template(ALTERNATING).render(messages) == shown
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert template(plain).render(messages).count("[") == len(turns)


def test_what_a_template_refuses_all_the_same_is_told_as_it_was_first():
    source = "{% if messages | length > 1 %}{{ raise_exception('two') }}{% endif %}{{ raise_exception('one') }}"
    messages = [ChatMessage(role="user", content="a"), ChatMessage(role="user", content="b")]
    with pytest.raises(ApiError, match="two") as refused:
        template(source).render(messages)
    assert refused.value.status == 422
    named = [msgspec.structs.replace(message, name=message.content) for message in messages]
    with pytest.raises(ApiError, match="roles must alternate"):
        template(ALTERNATING).render(named)


def test_absent_fields_are_not_there():
    assert template("{{ messages[0] | tojson }}").render(USER) == json.dumps({"role": "user", "content": "hi"})


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("{{ raise_exception('roles must alternate') }}", 422),
        ("{{ messages[0].content.nothing.more }}", 422),
        ("{{ 1 / 0 }}", 422),
        ("{{ messages.append(1) }}", 422),
        ("{{ ''.__class__.__mro__ }}", 422),
        ("{{ messages.__init__.__globals__ }}", 422),
        ("{% for i in range(10000000) %}{% endfor %}", 422),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{{ messages[0] }}{% endfor %}{% endfor %}", 400),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = messages[0] %}{% endfor %}{% endfor %}",
            400,
        ),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", 400),
    ],
)
def test_a_template_that_fails_is_the_clients_error(source, status):
    with pytest.raises(ApiError) as caught:
        template(source, tick=100_000).render(USER)
    assert caught.value.status == status
    assert caught.value.detail.param == "messages"


def test_a_source_that_is_no_template_is_refused_at_once():
    with pytest.raises(ValueError, match="chat template is not valid"):
        template("{% for %}")
