"""Meshes and troubles drawn from a seed: any legal shape, tiny pools, slow and leaving clients, late and repeated messages."""

from random import Random

from simulation import World

TEXT = """
[mesh]
tp = {tp}
dp = {dp}
attn_tp = {attn_tp}
split = {split}
[engine]
kind = 'null'
kv_pages = {pages}
page_tokens = {page_tokens}
[model]
max_model_len = {longest}
[decode]
slots = {slots}
pace_ms = {pace_ms}
[prefill]
chunk_tokens = {chunk_tokens}
[group]
reserve_tokens = {reserve_tokens}
max_waiting = {max_waiting}
prefix_cache = {prefix_cache}
age_s = {age_s}
[router]
policy = '{policy}'
[barrier]
hold_ms = {hold_ms}
[gateway]
processes = {gateways}
"""


def topology(**values):
    """The text of a topology file; anything left out has a plain value."""
    plain = {
        "tp": 2,
        "dp": 2,
        "attn_tp": 1,
        "split": "true",
        "pages": 40,
        "page_tokens": 4,
        "longest": 96,
        "slots": 8,
        "chunk_tokens": 16,
        "reserve_tokens": 8,
        "max_waiting": 1000,
        "prefix_cache": "true",
        "age_s": 10.0,
        "policy": "prefix",
        "hold_ms": 0,
        "pace_ms": 0,
        "gateways": 1,
    }
    return TEXT.format(**plain | values)


def world(**values):
    """A world whose topology has the values that belong to it, and the rest is its own."""
    own = {key: values.pop(key) for key in list(values) if key in World.__dataclass_fields__ and key not in SHARED}
    shared = {key: values[key] for key in SHARED if key in values}
    return World(topology(**values), **shared, **own)


SHARED = ("pages", "page_tokens", "longest")


def drawn(seed, groups=None):
    """Anything at all."""
    random = Random(seed * 7919)
    dp = groups or random.choice([1, 1, 2, 2, 3, 4, 8, 16])
    attn_tp = 1 if dp > 4 else random.choice([1, 1, 2, 3])
    longest, page_tokens = random.choice([16, 40, 96]), random.choice([1, 2, 4, 8])
    return world(
        dp=dp,
        attn_tp=attn_tp,
        tp=random.choice([attn_tp, dp * attn_tp, dp * attn_tp]),
        split=random.choice(["true", "false"]),
        longest=longest,
        page_tokens=page_tokens,
        pages=-(-longest // page_tokens) + 1 + random.choice([0, 1, 3, 10, 40]),
        slots=random.choice([1, 2, 6, 20]),
        chunk_tokens=random.choice([1, 4, 16, 64]),
        reserve_tokens=random.choice([0, 4, 32]),
        max_waiting=random.choice([3, 1000, 1000]),
        prefix_cache=random.choice(["true", "true", "false"]),
        age_s=random.choice([0.001, 10.0]),
        policy=random.choice(["prefix", "round_robin", "least_tokens"]),
        hold_ms=random.choice([0, 0, 3]),
        pace_ms=random.choice([0, 0, 2, 30]),
        gateways=random.choice([1, 2]),
        requests=random.choice([5, 30, 60]),
        max_prompt=random.randrange(1, longest),
        max_out=random.choice([1, 8, 40]),
        aborts=random.choice([0, 0, 0.3, 0.9]),
        retries=random.choice([0, 0, 0.1, 0.4]),
        slow_clients=random.choice([0, 0, 0.3]),
        stops=random.choice([0, 0.5]),
        repeats=random.choice([0, 0.3]),
        delay_ms=random.choice([0.01, 0.1, 3]),
        step_ms=random.choice([0.1, 1, 10]),
        spread_ms=random.choice([1, 60, 1000]),
        codec=random.random() < 0.2,
        grammars=random.choice([0, 0, 0.3, 1]),
        grammar_ms=random.choice([0.01, 0.3, 20]),
    )
