"""The real gateway process, driven by real clients, in front of a scripted mesh."""

import asyncio
import contextlib
import functools
import json
import operator
import random
import threading
import time

import httpx
import openai
import pytest
from gateway_fake_mesh import PATIENCE_S, PROMPT, TEMPLATE, FakeMesh, completion, connect, send, wait_for
from openai import AsyncOpenAI, OpenAI


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(max_body_bytes=1 << 20, max_streams=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh):
    with OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as made:
        yield made


def of(mesh, session):
    return [submit for submit in mesh.submits if submit.session == session]


def post(http, body, path="/v1/completions", **given):
    return http.post(path, json={"model": "tiny", "prompt": PROMPT, "max_tokens": 200} | body, **given)


# --- answers ---


def test_a_completion_says_what_the_group_said(client):
    answer = completion(client)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens > 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert completion(client, max_tokens=3).choices[0].finish_reason == "length"


def test_a_chat_goes_through_the_template(client, mesh):
    messages = [{"role": "user", "content": "hello 🎉"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body={"session": "chat-1"})
    # Special tokens of the echoed prompt are not shown.
    assert answer.choices[0].message.content == "user\nhello 🎉\nassistant\n"
    [submit] = of(mesh, "chat-1")
    rendered = mesh.tokenizer.decode(submit.prompt.tolist(), skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhello 🎉<|im_end|>\n<|im_start|>assistant\n"
    assert "add_generation_prompt" in TEMPLATE


@pytest.mark.parametrize("include_usage", [True, False])
def test_streaming_has_openais_shape(client, include_usage):
    extra = {"stream_options": {"include_usage": True}} if include_usage else {}
    messages = [{"role": "user", "content": PROMPT}]
    stream = client.chat.completions.create(model="tiny", messages=messages, stream=True, **extra)
    chunks = list(stream)
    last = chunks.pop() if include_usage else None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = client.chat.completions.create(model="tiny", messages=messages)
    assert text == whole.choices[0].message.content
    assert all("\N{REPLACEMENT CHARACTER}" not in (chunk.choices[0].delta.content or "") for chunk in chunks)
    if last is not None:
        assert (last.choices, last.usage) == ([], whole.usage)


def test_a_stream_ends_with_done(http):
    with http.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "fox", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = list(answer.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens_are_cut_and_cancel(client, mesh, stream):
    before = len(mesh.cancels)
    answer = completion(client, stop=["ox ju"], stream=stream, extra_body={"session": "endless"}, max_tokens=4000)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        text = answer.choices[0].text
        assert answer.choices[0].finish_reason == "stop"
    assert text == "the quick brown f"
    wait_for(lambda: len(mesh.cancels) > before, "the group is told")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(client, stream):
    prompts = ["the fox", "日本 🎉", "dog"]
    answer = completion(client, prompt=prompts, n=2, stream=stream, seed=3)
    texts = dict.fromkeys(range(6), "")
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage.prompt_tokens * 2 == answer.usage.completion_tokens
    assert texts == dict(enumerate(text for text in prompts for _ in range(2)))


def test_token_ids_as_prompts(client, mesh):
    ids = mesh.tokenizer.encode("the fox").ids
    assert completion(client, prompt=ids).choices[0].text == "the fox"
    assert [choice.text for choice in completion(client, prompt=[ids, ids]).choices] == ["the fox"] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "text"), [(0, "the fox"), (2, "the foxthe fox"), (None, "the foxthe fox")])
def test_echo(client, stream, length, text):
    answer = completion(client, prompt="the fox", echo=True, max_tokens=length, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    if length == 0:
        assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_in_both_apis_and_both_ways(client, mesh):
    answer = completion(client, prompt="the fox", logprobs=2)
    columns = answer.choices[0].logprobs
    assert "".join(columns.tokens) == "the fox"
    assert len(columns.top_logprobs[0]) == 2
    assert columns.text_offset == [0, len(columns.tokens[0])]
    chunks = list(completion(client, prompt="the fox", logprobs=2, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert functools.reduce(operator.iadd, (each.tokens for each in streamed), []) == columns.tokens
    assert functools.reduce(operator.iadd, (each.text_offset for each in streamed), []) == columns.text_offset
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**chat).choices[0].logprobs.content
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**chat, stream=True)]
    assert functools.reduce(operator.iadd, (part.content for part in parts if part), []) == whole
    assert {len(each.top_logprobs) for each in whole} == {3}
    assert len(whole) == len(mesh.tokenizer.encode("<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n").ids)


def test_repeated_items_change_nothing(client):
    assert completion(client, extra_body={"session": "twice"}).choices[0].text == PROMPT
    chunks = completion(client, extra_body={"session": "twice"}, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT


def test_sixty_four_at_once_streaming_and_not(mesh):
    async def one(client, number):
        prompt = f"{PROMPT} {number}"
        if number % 2:
            stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=300, stream=True)
            return prompt, "".join([chunk.choices[0].text async for chunk in stream])
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=300)
        return prompt, answer.choices[0].text

    async def everyone():
        async with AsyncOpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    for prompt, text in asyncio.run(everyone()):
        assert text == prompt


def test_the_same_request_id_twice_at_once(mesh, http):
    def ask(found):
        answer = http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "request_id": "mine"},
            headers={"X-Request-Id": "other"},
        )
        found.append((answer.headers["x-request-id"], answer.json()["choices"][0]["text"], answer.json()["id"]))

    found = []
    threads = [threading.Thread(target=ask, args=(found,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(name, text) for name, text, _ in found] == [("mine", PROMPT)] * 8
    assert len({inner for _, _, inner in found}) == 8


# --- what reaches the mesh ---


def test_sampling_reaches_the_router_resolved(http, mesh):
    body = {"temperature": 0.5, "seed": 9, "n": 2, "top_k": 5, "logit_bias": {"5": 1}, "group": 1, "session": "s-1"}
    assert post(http, body).status_code == 200
    first, second = of(mesh, "s-1")
    assert (first.sampling.temperature, first.sampling.seed, first.sampling.top_k) == (0.5, 9, 5)
    assert [first.sampling.choice, second.sampling.choice] == [0, 1]
    assert first.request != second.request
    assert (first.pin, first.sampling.logit_bias) == (1, ((5, 1.0),))


def test_a_seed_is_drawn_where_none_is_given(http, mesh):
    for _ in range(2):
        post(http, {"session": "s-2"})
    assert len({submit.sampling.seed for submit in of(mesh, "s-2")}) == 2


def test_the_pin_works_on_each_endpoint(http, mesh):
    for path, body in (
        ("/v1/completions", {"prompt": "fox"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}]}),
    ):
        for group in (0, 1):
            answer = http.post(path, json={"model": "tiny", "group": group, "user": f"pin{path}{group}"} | body)
            assert answer.status_code == 200
            [submit] = of(mesh, f"pin{path}{group}")
            finished = wait_for(
                lambda submit=submit: [e for e in mesh.trace("request.finished") if e["request"] == submit.request],
                "it is traced",
            )
            assert finished[0]["group"] == group
        assert http.post(path, json={"model": "tiny", "group": 2} | body).status_code == 400


# --- refusals ---


def test_errors_are_openais(client, mesh):
    with pytest.raises(openai.BadRequestError) as bad:
        completion(client, temperature=9)
    assert bad.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError) as lost:
        completion(client, model="other")
    assert lost.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        completion(client, prompt="")
    with pytest.raises(openai.RateLimitError) as busy:
        completion(client, extra_body={"session": "reject:429"})
    assert busy.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.InternalServerError) as failed:
        completion(client, extra_body={"session": "fail"})
    assert failed.value.status_code == 503
    wait_for(lambda: not mesh.live, "nothing is left at the groups")


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_a_400_streaming_or_not(client, mesh, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        completion(client, prompt=[5] * mesh.capacity.max_model_len, max_tokens=1, stream=stream)
    assert caught.value.body["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_router_is_a_status_streaming_or_not(client, stream):
    with pytest.raises(openai.RateLimitError):
        completion(client, stream=stream, n=3, extra_body={"session": "reject:429"})


def test_a_failure_after_the_first_event_is_an_event(http):
    with http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "fox", "stream": True, "session": "fail"}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if answer.status_code == 200:
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "group_failed"
        assert lines[-1] == "data: [DONE]"
    else:
        assert answer.status_code == 503


@pytest.mark.parametrize("prompt", [[-1], [400], [1 << 40], [[5], [-1]], [], [[]], "", [""]])
def test_bad_ids_reach_nobody(http, mesh, prompt):
    before = len(mesh.submits)
    for stream in (False, True):
        answer = post(http, {"prompt": prompt, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    for param in ("stop_token_ids", "allowed_token_ids"):
        assert post(http, {param: [400]}).json()["error"]["param"] == param
    assert post(http, {"logit_bias": {"400": 1}}).status_code == 400
    assert len(mesh.submits) == before


def test_bodies_have_bounds_and_forms(http):
    big = http.post("/v1/completions", content=b'{"model":"tiny","prompt":"' + b"x" * (1 << 20) + b'"}')
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    parts = (b"x" * 65536 for _ in range(40))
    with contextlib.suppress(httpx.TransportError):
        assert http.post("/v1/completions", content=parts).status_code == 413
    for body in (b"", b"{", b"[]", b"\xff", b'{"model":"tiny","prompt":"\\ud800"}'):
        answer = http.post("/v1/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_other_paths_and_methods(http):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/chat/completions/", 404),
    ):
        answer = http.request(method, path, follow_redirects=True)
        assert answer.status_code in {status, 405}
        assert answer.json()["error"]["message"]


def test_random_bodies_never_break_it(http):
    dice = random.Random(7)
    words = [
        "model",
        "prompt",
        "messages",
        "n",
        "stream",
        "stop",
        "logprobs",
        "max_tokens",
        "tools",
        "seed",
        "x",
        "echo",
    ]
    values = [None, True, 0, -1, 2, 1.5, 1e308, "", "tiny", "x" * 50, [], [1], [-1], ["a"], [[1]], {}, {"a": 1}, [None]]
    for _ in range(250):
        body = {dice.choice(words): dice.choice(values) for _ in range(dice.randrange(4))} | {"max_tokens": 2}
        if dice.random() < 0.7:
            body = {"model": "tiny", "prompt": "fox"} | body
        data = bytearray(json.dumps(body).encode())
        if dice.random() < 0.3:
            data[dice.randrange(len(data))] = dice.randrange(256)
        path = dice.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        answer = http.post(path, content=bytes(data))
        assert answer.status_code < 500, (path, bytes(data), answer.text)


def test_a_malformed_http_request_ends_only_its_connection(mesh, http):
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with connect(mesh) as raw:
            raw.sendall(data)
            assert b" 400 " in raw.recv(4096).split(b"\r\n")[0] + b" "
    assert http.get("/health").status_code == 200


# --- clients that leave, or do not read ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["hold", "endless", "lost"])
def test_a_client_that_hangs_up_is_noticed_at_once(mesh, stream, session):
    before, placed = len(mesh.cancels), len(mesh.submits)
    with connect(mesh) as raw:
        send(raw, {"stream": stream, "n": 3, "session": session, "max_tokens": 4000})
        wait_for(lambda: len(mesh.submits) == placed + 3, "the choices are submitted")
    # The promise is a second, for which a busy machine may take more; who does not notice never cancels.
    names = {submit.request for submit in mesh.submits[placed:]}
    if session != "lost":
        wait_for(lambda: {cancel.request for cancel in mesh.cancels[before:]} >= names, "all are cancelled", 15.0)
    wait_for(lambda: [e for e in mesh.trace("request.aborted") if e["request"] in names], "it is traced", 15.0)


def test_a_client_that_hangs_up_while_it_sends(mesh, http):
    for _ in range(5):
        with connect(mesh) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    open_requests = "edgemesh_open_requests"
    wait_for(
        lambda: next(
            line for line in http.get("/metrics").text.splitlines() if line.startswith(open_requests)
        ).endswith(" 0.0"),
        "nothing is left open",
    )


def test_a_cancelled_choice_is_cancelled_once_its_group_is_known(mesh):
    """A client that leaves before the router placed its request: the group hears of it with its first word."""
    placed = len(mesh.submits)
    with connect(mesh) as raw:
        send(raw, {"session": "lost"})
        wait_for(lambda: len(mesh.submits) > placed, "it is submitted")
    submit = mesh.submits[placed]
    wait_for(lambda: [e for e in mesh.trace("request.aborted") if e["request"] == submit.request], "it is given up")
    before = len(mesh.cancels)
    mesh.accept(submit, 1)
    cancel = wait_for(lambda: mesh.cancels[before:], "the group is told")[0]
    assert (cancel.request, cancel.group) == (submit.request, 1)


def test_a_slow_client_holds_no_more_than_its_credit_and_is_cut_off():
    with FakeMesh(group={"credit_deadline_s": 2.0}) as mesh, connect(mesh, receive_buffer=4096) as raw:
        send(raw, {"session": "flood", "stream": True, "max_tokens": 16000, "logprobs": 20})
        wait_for(lambda: mesh.submits, "it is submitted")
        name = mesh.submits[0].request
        assert mesh.submits[0].credit == 32
        wait_for(lambda: [each for each in mesh.cancels if each.request == name], "it is cut off")
        assert mesh.most_out[name] < 8000
        uptos = [credit.upto for credit in mesh.credits if credit.request == name]
        assert mesh.most_out[name] <= max(uptos, default=512)


def test_a_client_that_reads_gets_all_of_a_long_stream(client, mesh):
    chunks = list(completion(client, stream=True, max_tokens=4000, extra_body={"session": "flood", "ignore_eos": True}))
    assert chunks[-1].choices[0].finish_reason == "length"
    name = of(mesh, "flood")[-1].request
    assert mesh.most_out[name] == 4000
    uptos = [credit.upto for credit in mesh.credits if credit.request == name]
    assert uptos == sorted(uptos)
    assert uptos[-1] > 3000


# --- the other endpoints ---


def test_tokenize_and_back(http, mesh):
    answer = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == mesh.tokenizer.encode(PROMPT).ids
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == mesh.capacity.max_model_len
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "fox"}]}).json()
    assert mesh.tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_models_version_health_metrics(client, http):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert http.get("/version").json()["version"]
    assert http.get("/health").json() == {"status": "ok", "reason": ""}
    completion(client)
    text = http.get("/metrics").text
    for name in ("edgemesh_requests_total", "edgemesh_generated_tokens_total", "edgemesh_ttft_seconds_bucket"):
        assert f"{name}{{" in text
    assert 'gateway="gateway-0"' in text


def test_health_is_quick_while_a_long_prompt_is_tokenised(mesh, http):
    """The tokenizer works in a thread: the loop goes on answering. One that stands still does so every time."""
    text = "the quick brown fox " * 45_000

    def shares():
        """Of the time that the prompt took, what each answer took meanwhile."""
        spans, answers = [], []
        with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S) as other:
            thread = threading.Thread(target=lambda: answers.append(other.post("/tokenize", json={"prompt": text})))
            began = time.monotonic()
            thread.start()
            while thread.is_alive():
                start = time.monotonic()
                assert http.get("/health").status_code == 200
                spans.append(time.monotonic() - start)
            thread.join()
            whole = time.monotonic() - began
        assert answers[0].status_code == 200
        return [span / whole for span in spans]

    assert any(len(found) > 5 and max(found) < 0.5 for found in (shares() for _ in range(10)))


def test_a_request_is_traced_from_its_arrival_to_its_end(http, mesh):
    answer = post(http, {"stream": False}, headers={"X-Request-Id": "client-7"})
    name = answer.json()["id"]
    wait_for(lambda: [e for e in mesh.trace("request.finished") if e["request"] == name], "the trace is written")
    events = {}
    for event in ("received", "tokenised", "submitted", "accepted", "first_token", "sent", "finished"):
        [events[event]] = [e for e in mesh.trace(f"request.{event}") if e["request"] == name]
    assert events["received"]["endpoint"] == "completions"
    assert events["received"]["external"] == "client-7"
    assert events["finished"]["finish"] == "stop"
    assert events["finished"]["output_tokens"] == events["sent"]["tokens"] == events["tokenised"]["prompt_tokens"]
    assert 0 < events["finished"]["ttft_ns"] < events["finished"]["e2e_ns"]
    monos = [
        events[event]["mono"] for event in ("received", "tokenised", "submitted", "accepted", "first_token", "finished")
    ]
    assert monos == sorted(monos)
    known = {e["request"] for e in mesh.trace("request.failed")}
    post(http, {"top_p": 1.77})

    def told():
        return [e for e in mesh.trace("request.failed") if e["request"] not in known and "top_p" in e["reason"]]

    [failed] = wait_for(told, "the refusal is traced")
    assert (failed["status"], failed["code"]) == (400, "invalid_value")
