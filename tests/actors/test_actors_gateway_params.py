"""What parameters change in the answers of a real gateway, in front of a scripted mesh that says the prompt back."""

import openai
import pytest
from gateway_fake_mesh import EOS, PATIENCE_S, PROMPT, FakeMesh, completion, wait_for
from openai import OpenAI


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh() as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh):
    with OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def chat(client, *turns, **given):
    messages = [{"role": role, "content": content} for role, content in turns or [("user", PROMPT)]]
    return client.chat.completions.create(model="tiny", messages=messages, **given)


def choices_of(answer, stream, index=0):
    chunks = list(answer) if stream else [answer]
    return [choice for chunk in chunks for choice in chunk.choices if choice.index == index]


def text_of(choices):
    return "".join(choice.text for choice in choices)


both_ways = pytest.mark.parametrize("stream", [False, True])


@both_ways
def test_token_ids_of_a_completion(client, mesh, stream):
    prompts, ids = ["the fox", PROMPT], []
    answer = completion(client, prompt=prompts, n=2, stream=stream, extra_body={"return_token_ids": True})
    chunks = list(answer) if stream else [answer]
    for index in range(4):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        wanted = mesh.tokenizer.encode(prompts[index // 2]).ids
        assert mine[0].prompt_token_ids == wanted
        assert [token for choice in mine for token in getattr(choice, "token_ids", [])] == wanted
        ids.append(wanted)
        if stream:
            assert not any(hasattr(choice, "prompt_token_ids") for choice in mine[1:])
    plain = choices_of(completion(client, stream=stream), stream)
    assert not any(hasattr(choice, "token_ids") or hasattr(choice, "prompt_token_ids") for choice in plain)


@both_ways
def test_token_ids_of_a_chat(client, mesh, stream):
    answer = chat(client, stream=stream, extra_body={"return_token_ids": True})
    chunks = list(answer) if stream else [answer]
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert chunks[0].prompt_token_ids == mesh.tokenizer.encode(rendered).ids
    said = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
    assert said == chunks[0].prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])


@both_ways
def test_token_ids_end_with_the_token_that_completed_a_stop_string(client, mesh, stream):
    answer = completion(client, prompt="the fox", stop="ox", stream=stream, extra_body={"return_token_ids": True})
    mine = choices_of(answer, stream)
    found = [token for choice in mine for token in getattr(choice, "token_ids", [])]
    assert text_of(mine) == "the f"
    assert "ox" in mesh.tokenizer.decode(found)
    assert "ox" not in mesh.tokenizer.decode(found[:-1])


@both_ways
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_named_and_shown_where_asked_for(client, stream, include):
    extra = {"include_stop_str_in_output": include}
    mine = choices_of(completion(client, stop=["ox ju", "zzz"], stream=stream, extra_body=extra), stream)
    assert text_of(mine) == "the quick brown f" + ("ox ju" if include else "")
    assert (mine[-1].finish_reason, mine[-1].stop_reason) == ("stop", "ox ju")
    answer = chat(client, stop=["ox ju"], stream=stream, extra_body=extra)
    chunks = list(answer) if stream else [answer]
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].stop_reason) == ("stop", "ox ju")


@both_ways
def test_stop_tokens_are_named_and_shown_where_asked_for(client, mesh, stream):
    [own] = mesh.tokenizer.encode("z").ids

    def ended(**extra):
        mine = choices_of(completion(client, stream=stream, extra_body=extra), stream)
        return text_of(mine), mine[-1].finish_reason, mine[-1].stop_reason

    assert ended() == (PROMPT, "stop", None)
    assert ended(stop_token_ids=[own]) == (PROMPT, "stop", own)
    assert ended(stop_token_ids=[own], include_stop_str_in_output=True) == (PROMPT + "z", "stop", own)
    assert ended(include_stop_str_in_output=True) == (PROMPT, "stop", None)
    shown = ended(include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown == (PROMPT + "<|endoftext|>", "stop", None)
    assert ended(ignore_eos=True, stop_token_ids=[EOS]) == (PROMPT, "stop", EOS)


def test_the_best_of_what_was_drawn_is_given(client, mesh):
    # The mesh's choices have -0.5, -3.5, -2.5 and -1.5 a token.
    before = len(mesh.submits)
    asked = {"prompt": ["the fox", "dog"], "n": 2, "extra_body": {"best_of": 4}}
    answer = completion(client, **asked, logprobs=1)
    assert len(mesh.submits) == before + 8
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["the fox"] * 2 + ["dog"] * 2
    assert [choice.logprobs.token_logprobs[0] for choice in answer.choices] == [-0.5, -1.5] * 2
    tokens = len(mesh.tokenizer.encode("the fox").ids) + len(mesh.tokenizer.encode("dog").ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, 4 * tokens)
    assert {choice.logprobs for choice in completion(client, **asked).choices} == {None}


def test_usage_comes_with_every_chunk_where_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for make in (completion, chat):
        chunks = list(make(client, stream=True, n=2, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 2 * chunks[-1].usage.prompt_tokens
        assert chunks[-1].choices == []
        whole = make(client, n=2).usage
        assert chunks[-1].usage == whole
    plain = list(completion(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in plain[:-1]] == [None] * (len(plain) - 1)


def test_usage_has_openais_details(client):
    usage = completion(client).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.model_dump(exclude_none=True) == {"cached_tokens": 2, "audio_tokens": 0}
    names = ("reasoning_tokens", "audio_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    assert usage.completion_tokens_details.model_dump(exclude_none=True) == dict.fromkeys(names, 0)


@both_ways
def test_log_probabilities_may_name_tokens_by_their_ids(client, mesh, stream):
    extra = {"return_tokens_as_token_ids": True}
    mine = choices_of(completion(client, prompt="the fox", logprobs=2, stream=stream, extra_body=extra), stream)
    names = [token for choice in mine if choice.logprobs for token in choice.logprobs.tokens]
    assert names == [f"token_id:{token}" for token in mesh.tokenizer.encode("the fox").ids]
    said = chat(client, logprobs=True, top_logprobs=2, extra_body=extra).choices[0].logprobs.content
    assert all(entry.token.startswith("token_id:") for entry in said)
    assert bytes(said[1].bytes) == b"user"[: len(said[1].bytes)]


@both_ways
def test_a_message_is_continued_and_echoed_where_asked_for(client, mesh, stream):
    turns = [("user", "hello"), ("assistant", "the quick ")]

    def said(**extra):
        answer = chat(client, *turns, stream=stream, extra_body={"continue_final_message": True, **extra})
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    rest = "user\nhello\nassistant\nthe quick "
    assert said() == rest
    prompt = mesh.tokenizer.decode(mesh.submits[-1].prompt.tolist(), skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe quick "
    assert said(echo=True) == "the quick " + rest
    counted = client.with_options(base_url=mesh.url).post(
        "/tokenize",
        cast_to=object,
        body={
            "messages": [{"role": role, "content": content} for role, content in turns],
            "continue_final_message": True,
        },
    )
    assert counted["tokens"] == mesh.submits[-1].prompt.tolist()


def test_a_prompt_is_truncated(client, mesh):
    ids = mesh.tokenizer.encode(PROMPT).ids
    answer = completion(client, extra_body={"truncate_prompt_tokens": 3}, echo=True)
    assert mesh.submits[-1].prompt.tolist() == ids[-3:]
    assert answer.usage.prompt_tokens == 3
    assert answer.choices[0].text == mesh.tokenizer.decode(ids[-3:]) * 2
    completion(client, extra_body={"truncate_prompt_tokens": 3, "truncation_side": "right"})
    assert mesh.submits[-1].prompt.tolist() == ids[:3]
    most = mesh.capacity.max_model_len
    completion(client, prompt=[5] * (most + 50), max_tokens=4, extra_body={"truncate_prompt_tokens": -1})
    assert len(mesh.submits[-1].prompt) == most - 4


def test_bad_words_salts_and_priorities_reach_the_mesh(client, mesh):
    extra = {"bad_words": ["fox", "日本"], "cache_salt": "s", "priority": -3, "session_id": "agent-7"}
    completion(client, extra_body=extra, n=2)
    for submit in mesh.submits[-2:]:
        words = {mesh.tokenizer.decode(list(word)) for word in submit.sampling.bad_words}
        assert words == {"fox", " fox", "日本", " 日本"}
        assert submit.tenant not in {"", "s"}
        assert (submit.priority, submit.session) == (-3, "agent-7")


def test_names_and_labels_come_back(client, mesh):
    metadata = {"run": "7", "agent": "clicker"}
    answer = chat(client, metadata=metadata, service_tier="auto", extra_body={"request_id": "labelled"})
    assert (answer.metadata, answer.service_tier) == (metadata, "default")
    assert answer.system_fingerprint.startswith("fp_")
    [event] = wait_for(
        lambda: [each for each in mesh.trace("request.received") if each.get("external") == "labelled"], "it is traced"
    )
    assert event["metadata"] == metadata
    plain = chat(client)
    assert (plain.metadata, plain.service_tier) == (None, None)
    assert plain.system_fingerprint == answer.system_fingerprint == completion(client).system_fingerprint
    chunks = list(chat(client, stream=True, service_tier="default"))
    assert {(chunk.system_fingerprint, chunk.service_tier) for chunk in chunks} == {
        (answer.system_fingerprint, "default")
    }


@both_ways
@pytest.mark.parametrize("make", [completion, chat])
def test_what_does_not_fit_is_a_400_before_any_event(client, mesh, make, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        make(client, max_tokens=mesh.capacity.max_model_len, stream=stream)
    assert refused.value.code == "context_length_exceeded"


def test_documents_are_refused_by_a_template_that_does_not_read_them(client):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"documents": [{"title": "a", "text": "b"}]})
    assert (refused.value.param, "template" in refused.value.message) == ("documents", True)


def test_a_chat_template_of_the_client_is_refused_with_the_reason(client):
    with pytest.raises(openai.BadRequestError, match="a template is a program"):
        chat(client, extra_body={"chat_template": "{{ messages }}"})


def test_lengths_of_nothing_are_as_good_as_none(client):
    assert chat(client, max_tokens=None).choices[0].finish_reason == "stop"
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3
    assert completion(client, prompt=PROMPT * 3, max_tokens=None).usage.completion_tokens == 16


def test_embeddings_are_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model="tiny", input="x")
    assert refused.value.code == "endpoint_not_served"
    assert "/v1/chat/completions" in refused.value.message
