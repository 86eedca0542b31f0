"""Structured answers and tools by the helpers of the clients of OpenAI and Anthropic, whole and as streams."""

from typing import Literal

import anthropic
import openai
import pydantic
import pytest

from clusterkv_jax.serve import Settings, make_server
from tests.support.byte_model import ending_model
from tests.support.server import TEMPLATE, running

pytest.importorskip("llguidance")
USER = {"role": "user", "content": "Who are you?"}


class Town(pydantic.BaseModel, extra="forbid"):
    name: Literal["Bonn", "Ulm"]


class Weather(pydantic.BaseModel, extra="forbid"):
    """Of a town."""

    town: Town
    now: bool


@pytest.fixture(scope="module")
def address():
    settings = Settings("bytes")
    with running(make_server(ending_model(TEMPLATE), settings, slots=2, max_tokens=768, reserve=128)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_answers_are_parsed(client):
    chat = client.chat.completions.parse(model="bytes", messages=[USER], response_format=Weather, n=2, seed=4)
    assert all(isinstance(choice.message.parsed, Weather) for choice in chat.choices)
    response = client.responses.parse(model="bytes", input="Who?", text_format=Weather, temperature=1)
    assert isinstance(response.output_parsed, Weather)


def test_a_chat_streams_a_call(client):
    how = {"model": "bytes", "messages": [USER], "tools": [openai.pydantic_function_tool(Weather)]}
    with client.chat.completions.stream(**how, tool_choice="required", seed=1) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert ("".join(pieces), choice.finish_reason, call.function.name) == ("", "tool_calls", "Weather")
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_response_streams_a_call(client):
    tool = {"type": "function", "name": "weather", "strict": True, "parameters": Weather.model_json_schema()}
    with client.responses.stream(model="bytes", input="Who?", tools=[tool], tool_choice="required") as stream:
        events = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert "response.function_call_arguments.done" in events
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments)


def test_claude_streams_a_call(address):
    tool = {"name": "weather", "input_schema": Weather.model_json_schema()}
    ask = {"model": "bytes", "max_tokens": 120, "messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
    with (
        anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude,
        claude.messages.stream(**ask) as stream,
    ):
        message = stream.get_final_message()
    (use,) = message.content
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    assert Weather.model_validate(use.input)
