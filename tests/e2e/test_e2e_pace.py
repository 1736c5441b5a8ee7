"""`decode.pace_ms`: while prompts wait, decode leaves the cores to them; nothing that is said changes, and the trace tells."""

import json

from e2e_clients import posting, text_of, together, trace

PACE_MS = 120


def test_decode_keeps_its_pace_while_prompts_wait(mesh):
    served = mesh("tp1", decode__pace_ms=PACE_MS, prefill__chunk_tokens=16)
    row = posting(text="A row that decodes", max_tokens=40)
    prompts = [posting(prompt=[100 + number] * 300, max_tokens=2) for number in range(2)]
    (alone,) = together(served, [row])
    beside, *_ = together(served, [row, *prompts])
    assert text_of(beside) == text_of(alone)

    def totals(answer):
        return json.loads(trace(served, "show", answer["id"], "--json"))["totals"]

    assert totals(beside)["decode pace"] > PACE_MS * 1e6 / 2
    assert "decode pace" not in totals(alone)
