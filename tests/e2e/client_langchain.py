"""What langchain-openai gets from a server: run as `python client_langchain.py URL MODEL`; prints one JSON object."""

import asyncio
import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France? Answer in one word."
COMMON = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}

chat = ChatOpenAI(**COMMON, max_tokens=16)
player = ChatOpenAI(**COMMON, max_tokens=64)


class Move(BaseModel):
    """Go through doors."""

    direction: Literal["north", "south"]
    rooms: Literal[1, 2, 3]


def structured(method):
    return player.with_structured_output(Move, method=method).invoke("Go north by two rooms.").model_dump()


def called():
    bound = player.bind_tools([Move], tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke("Go north by two rooms.")
    chunks = list(bound.stream("Go north by two rooms."))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    return [[{"name": call["name"], "args": call["args"]} for call in each.tool_calls] for each in (whole, joined)]


async def streamed_at_once():
    async def one(question):
        return "".join([chunk.content async for chunk in chat.astream(question)])

    return await asyncio.gather(*(one(f"{number} plus one is") for number in range(4)))


def whole_and_streamed():
    whole = chat.invoke([("system", "You are terse."), ("human", QUESTION)])
    chunks = list(chat.stream([("system", "You are terse."), ("human", QUESTION)], stream_usage=True))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    return {
        "whole": whole.content,
        "finish": whole.response_metadata["finish_reason"],
        "usage": whole.usage_metadata["total_tokens"],
        "streamed": joined.content,
        "streamed_usage": joined.usage_metadata["total_tokens"],
    }


def logprobs():
    metadata = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata
    return [entry["token"] for entry in metadata["logprobs"]["content"]]


text = OpenAI(**COMMON, max_tokens=16)
found = whole_and_streamed() | {
    "batch": [answer.content for answer in chat.batch([f"{number} plus one is" for number in range(4)])],
    "at_once": asyncio.run(streamed_at_once()),
    "logprobs": logprobs(),
    "plain": chat.invoke(QUESTION).content,
    "structured": structured("json_schema"),
    "function": structured("function_calling"),
    "called": called(),
    "choices": [[each.text for each in answers] for answers in text.generate(["One, two,", "Red, blue,"]).generations],
    "text": text.invoke("Once upon a time"),
    "streamed_text": "".join(text.stream("Once upon a time")),
}
sys.stdout.write(json.dumps(found))
