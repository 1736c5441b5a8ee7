"""What litellm gets from a server: run as `python client_litellm.py URL MODEL`; prints one JSON object."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
COMMON = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 16, "num_retries": 0}
CHAT = COMMON | {"model": f"openai/{MODEL}", "messages": QUESTION}
TEXT = COMMON | {"model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}


def said(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def at_once():
    async def streamed():
        return said([chunk async for chunk in await litellm.acompletion(**CHAT, stream=True)])

    whole = [litellm.acompletion(**CHAT) for _ in range(4)]
    *answers, stream = await asyncio.gather(*whole, streamed())
    return [answer.choices[0].message.content for answer in answers] + [stream]


def refused():
    try:
        litellm.completion(**CHAT | {"temperature": 3})
    except litellm.BadRequestError as error:
        return str(error)
    return ""


whole = litellm.completion(**CHAT)
chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
text = litellm.text_completion(**TEXT)
pieces = [piece.choices[0].text or "" for piece in litellm.text_completion(**TEXT, stream=True)]
served = litellm.completion(**CHAT | {"model": f"hosted_vllm/{MODEL}"}, top_k=5, seed=1, repetition_penalty=1.1)
found = {
    "whole": whole.choices[0].message.content,
    "finish": whole.choices[0].finish_reason,
    "usage": whole.usage.total_tokens,
    "streamed": said(chunks),
    "streamed_usage": [chunk.usage.total_tokens for chunk in chunks if getattr(chunk, "usage", None)],
    "text": text.choices[0].text,
    "streamed_text": "".join(pieces),
    "vllm": served.choices[0].message.content,
    "at_once": asyncio.run(at_once()),
    "refused": refused(),
}
sys.stdout.write(json.dumps(found))
