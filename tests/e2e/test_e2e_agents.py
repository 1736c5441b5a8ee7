"""Agents as they run against this server: many turns of tool calls under one long prompt, with connections that break off."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
from e2e_clients import MODEL, PATIENCE_S

pytestmark = pytest.mark.parametrize("served", ["tp2-dp2 split"], indirect=True)

RULES = "You play a game in a maze of rooms. " + " ".join(
    f"Room {number} has a door to room {number * 7 % 40} in the {side}."
    for number, side in enumerate(["north", "south", "east", "west"] * 4)
)
TOOLS = {
    "move": {
        "type": "object",
        "properties": {
            "direction": {"type": "string", "enum": ["north", "south", "east", "west"]},
            "rooms": {"type": "integer", "enum": [1, 2, 3]},
        },
        "required": ["direction", "rooms"],
        "additionalProperties": False,
    },
    "look": {
        "type": "object",
        "properties": {"at": {"type": "string", "enum": ["door", "floor", "map"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
OFFERED = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": parameters, "strict": True},
    }
    for name, parameters in TOOLS.items()
]


class Agent:
    """One conversation; ``cached`` is how much of each turn's prompt was not computed again.

    Each has a group of its own: where both hang up at once, one might be overloaded for a moment.
    """

    def __init__(self, served, group, goal):
        self.client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        self.group = group
        self.messages = [{"role": "system", "content": RULES}, {"role": "user", "content": goal}]
        self.cached, self.prompts, self.calls = [], [], []

    def asked(self, choice, max_tokens=64):
        return {
            "model": MODEL,
            "messages": self.messages,
            "tools": OFFERED,
            "tool_choice": choice,
            "temperature": 0,
            "parallel_tool_calls": False,
            "max_tokens": max_tokens,
            "extra_body": {"session": self.messages[1]["content"], "group": self.group},
        }

    def hang_up(self, choice):
        """Begin to read an answer, and break off."""
        with self.client.chat.completions.create(**self.asked(choice), stream=True) as stream:
            next(iter(stream))

    def turn(self, choice):
        """A turn with tools: one answer whole, and the same streamed; they must be one. Its calls are carried out."""
        whole = self.client.chat.completions.create(**self.asked(choice))
        with self.client.chat.completions.stream(**self.asked(choice)) as stream:
            streamed = stream.get_final_completion()
        assert said(streamed) == said(whole)
        self.cached.append(whole.usage.prompt_tokens_details.cached_tokens)
        self.prompts.append(whole.usage.prompt_tokens)
        message = whole.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, TOOLS[call.function.name])
            self.calls.append((call.function.name, arguments))
            result = f"Done: {call.function.name}. You are in room {len(self.calls)}."
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return whole.choices[0]


def said(completion):
    """Everything of an answer but its names."""
    (choice,) = completion.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def play(served, group, goal):
    agent = Agent(served, group, goal)
    with agent.client:
        for _ in range(2):
            agent.hang_up("required")
            ended = agent.turn("required")
            assert ended.finish_reason == "tool_calls"
            assert ended.message.tool_calls
        agent.hang_up("auto")
        agent.turn("auto")
        agent.messages.append({"role": "user", "content": "What did you do?"})
        last = agent.client.chat.completions.create(**agent.asked("none", max_tokens=8)).choices[0]
        assert last.message.content
        assert not last.message.tool_calls
    return agent


def test_agents_call_tools_over_many_turns(served, traces):
    goals = ["Find the way out.", "Draw a map."]
    with ThreadPoolExecutor(len(goals)) as pool:
        agents = list(pool.map(lambda group: play(served, group, goals[group]), range(len(goals))))
    for agent in agents:
        assert len(agent.calls) >= 2
        # Whatever was said before, rules and all, is not computed again.
        for before, cached in zip(agent.prompts, agent.cached[1:], strict=False):
            assert cached >= before - 64
    traces.settle()
    admitted = list(traces.events("request.admitted", actors="group-*"))
    hits = [event for event in admitted if event["cached_tokens"] > 200]
    assert len(hits) > len(admitted) * 2 // 3
    assert list(traces.events("request.aborted", actors="gateway-*"))
