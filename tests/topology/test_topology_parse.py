import tomllib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topology_strategies import topologies

from edgemesh.topology import Topology, TopologyError, load, parse, resolve, shipped, shipped_names

KEYS = [
    (section.name, key.name, key.type)
    for section in msgspec.structs.fields(Topology)
    for key in msgspec.structs.fields(section.type)
]


def refusal(text, *overrides):
    with pytest.raises(TopologyError) as caught:
        parse(text, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


def test_an_empty_file_is_one_unsplit_question_answered_with_the_defaults():
    topology = parse("")
    assert topology == resolve(Topology())
    assert (topology.world, topology.mode, topology.engine.page_tokens) == (1, "plain TP", 16)


def test_resolving_fills_in_what_the_rules_decide_and_resolving_twice_changes_nothing():
    topology = parse('[mesh]\ntp = 8\ndp = 2\n[engine]\ndevice = "cuda"')
    assert (topology.mesh.attn_tp, topology.engine.page_tokens) == (4, 256)
    assert resolve(topology) == topology


@given(topologies())
@settings(max_examples=50, deadline=None)
def test_a_resolved_topology_survives_json(topology):
    resolved = resolve(topology)
    assert msgspec.json.decode(msgspec.json.encode(resolved), type=Topology) == resolved


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # unknown keys and sections, and the nearest known
        ("[mesh]\ntpp = 2", "unknown key 'mesh.tpp'; did you mean 'mesh.tp'?"),
        ("[mesh]\nslots = 2", "did you mean 'decode.slots'?"),
        ("[gateway]\nhosts = 'a'", "did you mean 'gateway.host'?"),
        ("[mesh]\nhost = 'a'", "did you mean 'mesh.hosts'?"),
        ("[gateway]\nmax_bytes = 1", "did you mean 'gateway.max_body_bytes'?"),
        ("[trace]\nmax_body_bytes = 1", "did you mean 'trace.max_bytes'?"),
        ("[decode]\nchunk_tokens = 2", "unknown key 'decode.chunk_tokens'; did you mean 'prefill.chunk_tokens'?"),
        ("[gatway]\nport = 1", "unknown section 'gatway'; did you mean 'gateway'?"),
        ("tp = 2", "unknown key 'tp'; did you mean"),
        ("[mesh.extra]\nx = 1", "unknown key 'mesh.extra'"),
        ("[[mesh]]\ntp = 1", "mesh is a section"),
        ("mesh = 4", "mesh is a section"),
        # wrong types
        ('[mesh]\ntp = "2"', "mesh.tp = '2' is not legal; legal is a whole number from 1 to 64"),
        ("[mesh]\ntp = 2.0", "mesh.tp = 2.0"),
        ("[mesh]\ntp = true", "mesh.tp = true"),
        ("[mesh]\nsplit = 1", "legal is true or false"),
        ("[mesh]\nhosts = 'a'", "legal is a list of 1 to 64 entries"),
        ("[mesh]\nhosts = [1]", "(entry 0)"),
        ("[mesh]\nname = 2024-01-01", "mesh.name"),
        ("[model]\npath = ['x']", "model.path"),
        # illegal values
        ("[mesh]\ntp = 0", "from 1 to 64"),
        ("[mesh]\ntp = 65", "from 1 to 64"),
        ("[mesh]\ndp = -1", "from 1 to 64"),
        ("[mesh]\nname = 'no spaces please'", "1 to 48 lower-case letters"),
        ("[mesh]\nhosts = []", "1 to 64 entries"),
        ('[engine]\ndevice = "gpu"', 'legal is "cpu" or "cuda"'),
        ('[model]\ndtype = "float16"', '"bfloat16" or "float32"'),
        ("[engine]\nmemory_fraction = nan", "above 0 and up to 1"),
        ("[engine]\nmemory_fraction = 0", "above 0 and up to 1"),
        ("[router]\nload_bound = 0.5", "from 1 to 1000"),
        ("[supervisor]\ndrain_s = inf", "above 0 and up to 86400"),
        ("[gateway]\nport = 65536", "from 0 to 65535"),
        ("[model]\npath = ''", "1 to 4096 characters"),
        ("[mesh]\nbase_port = 80", "from 1024 to 65535"),
        # numbers that do not go together
        ("[mesh]\ntp = 6\ndp = 4", "Legal with tp = 6 is a dp of 1, 2, 3, 6; or state attn_tp = 6 (plain DP"),
        ("[mesh]\ntp = 8\ndp = 2\nattn_tp = 2", "attn_tp = 4 (attention DP: world 8; also the default) or attn_tp = 8"),
        ("[mesh]\ntp = 3\ndp = 2\nattn_tp = 2", "Legal is attn_tp = 3 (plain DP: 2 independent groups, world 6)."),
        ("[mesh]\ntp = 4\nattn_tp = 2", "Legal is attn_tp = 4, or leave it out"),
        ("[mesh]\ntp = 64\ndp = 2\nattn_tp = 64", "world of 128; the most is 64"),
        # hosts
        ('[mesh]\ntp = 2\nhosts = ["a", "a"]\nkeys_dir = "k"', "names a twice"),
        ('[mesh]\ntp = 2\nhosts = ["a", "b", "c"]\nkeys_dir = "k"', "list at most 2"),
        ('[mesh]\ntp = 2\nhosts = ["a", "b"]', "mesh.keys_dir"),
        ('[mesh]\nhosts = ["tcp://a"]', "without a port or a scheme"),
        ('[mesh]\nhosts = ["a:80"]', "neither an IP address nor a host name"),
        ('[mesh]\nhosts = ["1.2.3.400"]', "neither an IP address nor a host name"),
        ('[gateway]\nhost = "-x-"', "gateway.host"),
        # choices that do not go together
        ('[engine]\ncollectives = "nccl"', 'legal is "auto", "shm" or "gloo"'),
        ('[engine]\ndevice = "cuda"\ncollectives = "shm"', 'legal is "auto" or "nccl"'),
        ('[engine]\ndevice = "cuda"\ncollectives = "gloo"', 'legal is "auto" or "nccl"'),
        (
            '[mesh]\ntp = 2\nhosts = ["a","b"]\nkeys_dir = "k"\n[engine]\ncollectives = "shm"',
            'legal over several hosts is "auto"',
        ),
        ('[engine]\nattention = "flash-attn"', "needs engine.device"),
        ('[engine]\ndevice = "cuda"\nattention = "flash-attn"\n[model]\ndtype = "float32"', "bfloat16"),
        ('[engine]\ndevice = "cuda"\npage_tokens = 16', "a multiple of 256"),
        ("[engine]\nkv_pages = 1", "2 and more"),
        ("[engine]\nkv_pages = 10\n[model]\nmax_model_len = 145", "engine.kv_pages of 11 and more"),
        ("[group]\nmax_waiting_tokens = 10\n[model]\nmax_model_len = 11", "legal is 11 and more"),
        # no TOML at all
        ("[mesh", "this is not TOML"),
        ("[mesh]\ntp = 1\ntp = 2", "this is not TOML"),
        ("\x00", "this is not TOML"),
        ("x = " + "[" * 100_000, "this is not TOML"),
    ],
)
def test_every_mistake_names_the_key_the_value_and_what_is_legal(text, words):
    assert words in refusal(text)


@pytest.mark.parametrize(("section", "key", "kind"), KEYS)
def test_every_key_refuses_a_wrong_type_by_name_and_describes_itself(section, key, kind):
    message = refusal(f"[{section}]\n{key} = {{ a = 1 }}")
    assert message.startswith(f"{section}.{key} = {{'a': 1}} is not legal; legal is ")
    info = msgspec.inspect.type_info(kind)
    assert info.extra_json_schema["description"] in message


@pytest.mark.parametrize(("section", "key", "kind"), KEYS)
def test_every_key_misspelt_leads_back_to_itself(section, key, kind):
    assert f"did you mean '{section}.{key}'?" in refusal(f"[{section}]\n{key}x = 1")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("mesh.tp=4", "mesh", "tp", 4),
        (" mesh.tp = 4 ", "mesh", "tp", 4),
        ("mesh.split=false", "mesh", "split", False),
        ("model.path=org/Model-7B", "model", "path", "org/Model-7B"),
        ('model.path="quoted"', "model", "path", "quoted"),
        ("model.served_name=123", "model", "served_name", "123"),
        ("model.served_name=true", "model", "served_name", "true"),
        ("model.served_name=a=b", "model", "served_name", "a=b"),
        ("model.served_name=", "model", "served_name", ""),
        ("model.dtype=float32", "model", "dtype", "float32"),
        ("engine.memory_fraction=1", "engine", "memory_fraction", 1.0),
        ('mesh.hosts=["10.0.0.7"]', "mesh", "hosts", ("10.0.0.7",)),
        ("model.path=x\n[mesh]", "model", "path", "x\n[mesh]"),
    ],
)
def test_an_override_is_toml_or_a_bare_string(override, section, key, value):
    assert getattr(getattr(parse("[mesh]\ntp = 2", [override]), section), key) == value


def test_the_last_override_wins_over_the_file_and_over_those_before_it():
    assert parse("[mesh]\ntp = 2", ["mesh.tp=3", "mesh.tp=5"]).mesh.tp == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mesh.tp", "not of the form section.key=value"),
        ("tp=4", "not of the form section.key=value"),
        ("=4", "not of the form"),
        (".tp=4", "not of the form"),
        ("mash.tp=4", "unknown section 'mash'; did you mean 'mesh'?"),
        ("mesh.tq=4", "unknown key 'mesh.tq'; did you mean 'mesh.tp'?"),
        ("decode.chunk_tokens=5", "unknown key 'decode.chunk_tokens'; did you mean 'prefill.chunk_tokens'?"),
        ("mesh.tp=four", "mesh.tp = 'four' is not legal"),
        ("mesh.tp=1\ndp=2", "mesh.tp"),
        ("mesh.tp=", "mesh.tp = '' is not legal"),
        ("engine.device=tpu", 'legal is "cpu" or "cuda"'),
    ],
)
def test_a_bad_override_is_named(override, words):
    assert words in refusal("", override)


def test_an_override_of_a_section_that_the_file_made_a_value_is_refused():
    assert "mesh is a section" in refusal("mesh = 1", "mesh.tp=2")


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_topology_or_a_topology_error(text):
    try:
        parse(text, [f"model.served_name={text}"])
    except TopologyError:
        return
    tomllib.loads(text)


SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=3))


@given(st.sampled_from(KEYS), SCALARS)
@settings(max_examples=200, deadline=None)
def test_any_value_of_any_key_is_taken_or_refused_by_name(key, value):
    section, name, _ = key
    text = value if isinstance(value, str) else str(value).lower()
    said = f"{section}.{name}"
    try:
        parse("", [f"{section}.{name}={text}"])
    except TopologyError as error:
        said = str(error)
    assert f"{section}.{name}" in said


def test_load_says_which_file_and_why(tmp_path):
    cases = {
        "missing.toml": None,
        "latin.toml": b"[mesh]\nname = '\xe9'",
        "huge.toml": b"#" * ((1 << 20) + 1),
        "wrong.toml": b"[mesh]\ntp = 0",
    }
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TopologyError, match=name):
            load(tmp_path / name)
    with pytest.raises(TopologyError, match="Is a directory"):
        load(tmp_path)


def test_a_shipped_topology_loads_by_its_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("tp8-dp2") == load(shipped("tp8-dp2"))
    with pytest.raises(TopologyError, match="tp8-dp2-cpu"):
        load("tp8-dp3")


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_file_is_legal_and_has_its_own_name(name):
    topology = load(shipped(name))
    assert topology.mesh.name == name
    assert topology.engine.device == ("cpu" if name.endswith("-cpu") or name == "demo" else "cuda")


@pytest.mark.parametrize(
    ("name", "mode", "dp", "attn_tp"),
    [
        ("tp1", "plain TP", 1, 1),
        ("tp2", "plain TP", 1, 2),
        ("tp8", "plain TP", 1, 8),
        ("plain-tp2-dp2", "plain DP", 2, 2),
        ("tp4-dp2", "attention DP", 2, 2),
        ("tp8-dp2", "attention DP", 2, 4),
        ("tp8-dp8", "attention DP", 8, 1),
    ],
)
def test_shipped_files_are_the_shapes_that_their_names_say_and_have_a_cpu_twin(name, mode, dp, attn_tp):
    card, twin = load(shipped(name)), load(shipped(f"{name}-cpu"))
    assert (card.mode, card.mesh.dp, card.attn_tp, card.mesh.split) == (mode, dp, attn_tp, True)
    assert msgspec.structs.replace(twin.mesh, name=name) == card.mesh


def test_the_demo_is_split_attention_dp_for_a_laptop():
    demo = load("demo")
    assert (demo.mode, demo.mesh.split, demo.engine.threads, demo.model.path) == (
        "attention DP",
        True,
        1,
        "smollm2-135m",
    )


def test_shipped_files_that_are_not_installed_are_missed_in_words(tmp_path, monkeypatch):
    wheel, checkout = tmp_path / "shipped", tmp_path / "topology"
    monkeypatch.setattr("edgemesh.topology.files._PLACES", (wheel, checkout))
    with pytest.raises(TopologyError, match="install EdgeMesh again"):
        shipped("demo")
    for place in (checkout, wheel):
        place.mkdir()
        (place / "demo.toml").touch()
        assert shipped("demo.toml") == place / "demo.toml"
