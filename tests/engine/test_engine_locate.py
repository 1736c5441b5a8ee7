"""From a name to a directory that serves: nothing is downloaded, and what is missing is said."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers
import transformers
from engine_vault_gguf import write_gguf
from engine_vault_models import save_tiny, tiny_model

from edgemesh.engine.locate import is_hub_id, locate, models_dir, staged
from edgemesh.engine.shape import ModelError, read_shape
from edgemesh.engine.special import special_tokens

CORPUS = [
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\n\ttabs and 3.14",
    "naïve café — ½ ٣٤٥ 日本語 😀",
    "the cat sat on the mat; they'll don't we've I'M",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a",
    "<|im_start|>user\nhi<|im_end|>",
    "x<tool>y</tool>",
    " <|im_end|>",
    "\x00\u200b",
    "12 1 234",
]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level_tokens():
    """A trained byte-level vocabulary with a control and a user-defined token."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<tool>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    return vocab, [" ".join(merge) for merge in model["merges"]], [3, 3, 3, 4] + [1] * (len(vocab) - 4)


def gguf_tokens(pre="gpt-2", bos=None, template=TEMPLATE):
    vocab, merges, kinds = byte_level_tokens()

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocab)
        writer.add_token_merges(merges)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if template:
            writer.add_chat_template(template)
        if bos is not None:
            writer.add_add_bos_token(bos)

    return add


def sentencepiece_tokens(writer):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁",
        *"abcdehilnorstw",
        "he",
        "ll",
        "▁t",
        "▁th",
        "▁the",
        "lo",
        "hel",
        "hello",
        "▁hello",
        "or",
        "ld",
        "▁w",
        "▁wor",
        "▁world",
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_scores([0.0] * len(pieces) + [-float(index) for index in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def tiny_gguf(path, tokens=None, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, tiny_model("llama", vocab_size=420, **changes), tokens=tokens or gguf_tokens())
    return path


def same_tokens(directory, gguf, alone, texts=TEXTS, pre=""):
    alone.mkdir()  # transformers would prefer the files that we wrote beside it
    (alone / gguf.name).symlink_to(gguf)
    theirs = transformers.AutoTokenizer.from_pretrained(alone, gguf_file=gguf.name)
    if "smollm" in pre:
        # The model's published tokenizer takes each digit alone; transformers' reading of GGUF overlooks that.
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        rest = theirs.backend_tokenizer.pre_tokenizer
        theirs.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, rest])
    ours = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        expected = theirs(text)["input_ids"]
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected), text


def test_a_directory_is_itself(home):
    save_tiny("llama", home / "model")
    before = sorted((home / "model").iterdir())
    assert locate(str(home / "model")) == home / "model"
    assert sorted((home / "model").iterdir()) == before


@pytest.mark.parametrize("bos", [None, False, True])
def test_beside_a_gguf_its_config_and_tokenizer_are_written_once(home, bos):
    gguf = tiny_gguf(home / "models" / "tiny.gguf", gguf_tokens(bos=bos))
    directory = locate(str(gguf))
    assert directory == gguf.parent
    written = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert written.keys() == {"tiny.gguf", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert locate(str(gguf)) == locate(str(directory)) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == written

    config = json.loads((directory / "tokenizer_config.json").read_bytes())
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == (
        "<|im_start|>",
        "<|im_end|>",
        TEMPLATE,
    )
    assert read_shape(directory / "config.json").vocab == 420
    assert special_tokens(directory, 420) == ((2,), 1)
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode("hello").ids
    assert (ids[0] == 1) == bool(bos)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_a_byte_level_tokenizer_is_the_one_transformers_reads(home, pre):
    gguf = tiny_gguf(home / "tiny.gguf", gguf_tokens(pre))
    same_tokens(locate(str(gguf)), gguf, home / "alone", pre=pre)


def test_a_begin_token_is_added_as_transformers_adds_it(home):
    gguf = tiny_gguf(home / "tiny.gguf", gguf_tokens("llama-bpe", bos=True))
    same_tokens(locate(str(gguf)), gguf, home / "alone")


def test_a_sentencepiece_tokenizer_is_the_one_transformers_reads(home):
    gguf = tiny_gguf(home / "tiny.gguf", sentencepiece_tokens)
    directory = locate(str(gguf))
    texts = ["hello world", "the world", " hello", "a  b", "", "ünï", "the<s>hello</s>", "hello\nthe"]
    same_tokens(directory, gguf, home / "alone", texts)
    assert json.loads((directory / "tokenizer_config.json").read_bytes())["add_bos_token"] is True


@pytest.mark.e2e
def test_the_pulled_models_tokenizer_is_the_one_transformers_reads(tmp_path):
    directory = locate("smollm2-135m")
    (gguf,) = directory.glob("*.gguf")
    same_tokens(directory, gguf, tmp_path / "alone", pre="smollm")
    vocab = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    assert not [token for token in vocab if len(token) > 1 and token.strip("0123456789") != token]


def test_an_unknown_kind_of_tokenizer_says_what_to_do(home):
    gguf = tiny_gguf(home / "tiny.gguf", gguf_tokens("martian"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre: 'martian'.*tokenizer\.json beside"):
        locate(str(gguf))
    (home / "tokenizer.json").write_text("{}")
    (home / "tokenizer_config.json").write_text("{}")
    assert locate(str(gguf)) == home
    assert (home / "tokenizer.json").read_text() == "{}"


def test_ggufs_that_share_a_directory_get_one_of_their_own(home):
    one, two = (tiny_gguf(home / "models" / f"{name}.gguf") for name in ("one", "two"))
    first, second = locate(str(one)), locate(str(two))
    assert first != second
    assert {path.name for path in one.parent.iterdir()} == {"one.gguf", "two.gguf"}
    assert (first / "one.gguf").resolve() == one
    assert (first / "tokenizer.json").exists()
    assert first.parent == models_dir()
    assert locate(str(one)) == first
    with pytest.raises(ModelError, match=r"one\.gguf, two\.gguf"):
        locate(str(one.parent))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m", "run: edgemesh pull smollm2-135m"),
        ("someone/something", "run: edgemesh pull someone/something"),
        ("/no/such/path", "neither a directory, a GGUF file nor a hub id"),
        ("nonsense", "models to pull by name: smollm2-135m"),
        ("../none/here", "neither"),
        ("a\0b", "neither"),
        ("~no-such-user/x", "no-such-user"),
        ("x" * 5000, "too long"),
    ],
)
def test_what_is_not_here_says_how_to_get_it(home, name, words):
    with pytest.raises(ModelError, match=words):
        locate(name)


def test_a_directory_that_is_no_model_is_named(home):
    (home / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: holds neither config\.json nor a \.gguf file"):
        locate(str(home / "empty"))


def test_a_file_that_is_no_gguf_is_named(home):
    (home / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin: is neither a directory nor a \.gguf file"):
        locate(str(home / "model.bin"))
    (home / "bad.gguf").write_bytes(b"GGUX" * 10)
    with pytest.raises(ModelError, match=r"bad\.gguf: is no complete GGUF file"):
        locate(str(home / "bad.gguf"))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a/b", True),
        ("Qwen/Qwen3-8B", True),
        ("a", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/..", False),
        ("a/b\n", False),
    ],
)
def test_what_is_a_hub_id(name, is_one):
    assert is_hub_id(name) is is_one


def test_the_first_to_finish_a_directory_wins_and_nothing_is_left(tmp_path):
    with staged(tmp_path / "m") as first, staged(tmp_path / "m") as second:
        (first / "x").write_text("first")
        (second / "x").write_text("second")
    assert (tmp_path / "m" / "x").read_text() == "second"
    with pytest.raises(KeyError), staged(tmp_path / "n"):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_finding_a_model_needs_no_torch(home):
    gguf = tiny_gguf(home / "tiny.gguf")
    code = f"""
import sys
from edgemesh.engine.locate import locate
locate({str(gguf)!r})
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_special_tokens_are_the_generation_configs_first(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3, "bos_token_id": 1}')
    assert special_tokens(tmp_path, 10) == ((3,), 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6, 5]}')
    assert special_tokens(tmp_path, 10) == ((5, 6), 1)
    with pytest.raises(ModelError, match="special token 6 is not an id from 0 to 5"):
        special_tokens(tmp_path, 6)
