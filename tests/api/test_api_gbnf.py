"""GBNF grammars as Lark: the same texts, or a refusal that says where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_api_grammar import takes

from edgemesh.api.gbnf import GbnfError, lark

JSON = r"""
# any JSON object
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not"),
    [
        (JSON, ['{"a": [1, 2.5e3, "\\u00e9", null]}', "{}"], ["[]", '{"a":}', "{"]),
        ('root ::= "a" | "ab" [0-9]+ "5"', ["a", "ab55"], ["ab5", "b"]),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1+(22+3)"], ["1+", "()"]),
        ('root ::= .{2,3} "\\u00e9\\x41"', ["ab\u00e9A", "\n\n\u00e9A"], ["a\u00e9A"]),
        ('root ::= [^a-y] my-rule # said\nmy-rule ::= "q"? "\\"\\\\\\n"', ['zq"\\\n', '!"\\\n'], ['aq"\\\n']),
        ("root ::= [-+a\\]\\-]+", ["-+a]"], ["b"]),
        ('root ::= "x"{3}', ["xxx"], ["xx", "xxxx"]),
        ('root ::= (\n  "a" |\n  "b"\n)\n', ["a", "b"], ["ab"]),
    ],
)
def test_a_grammar_takes_its_texts(grammar, fits, does_not):
    source = "%llguidance {}\n" + lark(grammar)
    assert [text for text in fits if not takes(source, text)] == []
    assert [text for text in does_not if takes(source, text)] == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('rule ::= "a"', ["no rule `root`"]),
        ('root ::= "a"\nroot ::= "b"', ["line 2", "`root` is there twice"]),
        ('root ::= "a" other', ["line 1", "`other`", "no rule"]),
        ('root ::= "a" %', ["line 1", "%"]),
        ('"a" root ::= "b"', ["line 1", "begins with"]),
        ('root ::= "a"\n\nx ::= [z-a]', ["line 3", "backwards"]),
        ('root ::= "\\ud800"', ["line 1", "no character"]),
        ('root ::= "\\U00110000"', ["line 1", "no character"]),
        ('root ::= "open', ["line 1", "not understood"]),
        ("root ::= [", ["line 1", "not understood"]),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(grammar, words):
    with pytest.raises(GbnfError) as caught:
        lark(grammar)
    assert all(word in str(caught.value) for word in words), caught.value


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet='rot:=abc "[]()|*+?.{},0123\\^-#\n', max_size=60))
def test_any_text_is_converted_or_refused(text):
    told = ""
    try:
        told = lark('root ::= "a"\n' + text)
    except GbnfError as error:
        told = str(error)
    assert told.startswith(("start: ", "line ", "rule "))


@settings(deadline=None, max_examples=100)
@given(st.text(min_size=1, max_size=8))
def test_a_literal_and_a_set_spell_any_character(text):
    spelled = "".join(f"\\U{ord(each):08x}" for each in text)
    assert takes("%llguidance {}\n" + lark(f'root ::= "{spelled}"'), text)
    members = f"[{spelled}]"
    assert takes("%llguidance {}\n" + lark(f"root ::= {members}+"), text)


def test_a_long_text_takes_time_as_its_length():
    """Nothing in it may be looked at again and again: this would take minutes if it were."""
    for part in (
        "a" * 65536,
        'a ::= "' + "x" * 65000,
        " " * 65536,
        "a " * 32768,
        "\n" * 65536,
        "[" * 65536,
        '"\\' * 32768,
    ):
        with pytest.raises(GbnfError):
            lark(part)
