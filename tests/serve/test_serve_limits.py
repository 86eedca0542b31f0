"""What a server does with wrong bodies, full queues and its own end; and its parts that need no server."""

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints.loading import save_huggingface
from clusterkv_jax.serve import Settings, make_server
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.serve.grammar import allowed_tokens, of_call
from clusterkv_jax.serve.prompts import ChatPrompt, Prompt, joined, of_conversation
from clusterkv_jax.serve.tools import Call, ToolChoice, calls_in, choice_of, visible
from tests.fuzz.mutations import mutated
from tests.fuzz.rules import check_sentence
from tests.support.byte_model import byte_model, byte_tokenizer, ending_model
from tests.support.server import TEMPLATE, running, wait_for

USER = {"role": "user", "content": "Who are you?"}
FUNCTION = {"name": "weather", "description": "now", "parameters": {"type": "object"}}
DRAWING = {"temperature": 0.5, "top_p": 0.9, "stream": False, "n": 1, "stop": ["x"], "logit_bias": {"1": 1.0}}
BODIES = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1, "seed": 1, **DRAWING},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 1,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
        **DRAWING,
    },
    "/v1/responses": {"input": [USER], "max_output_tokens": 1, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [USER], "max_tokens": 1, "system": [{"type": "text", "text": "Be brief."}]},
    "/v1/messages/count_tokens": {"messages": [USER], "tools": [{"name": "weather", "input_schema": {}}]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def server():
    room = {"slots": 1, "max_tokens": 256, "reserve": 128, "max_waiting": 2}
    return make_server(byte_model(TEMPLATE), Settings("bytes", max_body_bytes=2**21), method=ckv.Full(), **room)


@pytest.fixture(scope="module")
def address(server):
    with running(server) as address:
        yield address


@given(data=st.data())
@pytest.mark.parametrize("path", BODIES)
def test_any_body_is_answered_or_refused_in_a_sentence(address, path, data):
    raw = data.draw(mutated(json.dumps(BODIES[path]), "json"))
    response = httpx.post(f"{address}{path}", content=raw, timeout=60)
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        about = response.json()
        assert path.startswith("/v1/messages") == (about.get("type") == "error")
        check_sentence(about["error"]["message"])


def test_a_full_queue_says_when_to_come_back(address, server):
    async def ask_many():
        ask = {"prompt": "Once", "max_tokens": 120}
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=ask) for _ in range(8)))

    answers = asyncio.run(ask_many())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert {answer.status_code for answer in answers} == {200, 429}
    wait_for(lambda: server.served.stats().active == 0)


@pytest.fixture
def folder(tmp_path):
    """A model in files, for a command."""
    (tmp_path / "tokens.json").write_text(byte_tokenizer().to_str())
    model, target = byte_model(), tmp_path / "bytes"
    save_huggingface(target, model.params, model.config, tokenizer_json=tmp_path / "tokens.json", dtype="float32")
    return target


def test_a_command_that_is_told_to_end_lets_answers_end(folder):
    room = ["--port", "0", "--slots", "1", "--max-tokens", "128", "--reserve", "64", "--method", "full"]
    command = [sys.executable, "-m", "clusterkv_jax", "serve", str(folder), *room]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said, address = next(line for line in process.stderr if "http://" in line).rsplit(maxsplit=1)
        body = {"prompt": "The ship", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert said.startswith("bytes · full · 1 slots")
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"


@pytest.fixture(scope="module")
def ending():
    """The address of a server whose model can end a text, which is drawn as JSON is."""
    with running(
        make_server(ending_model(TEMPLATE), Settings("bytes"), slots=1, max_tokens=256, reserve=128)
    ) as address:
        yield address


def test_answers_of_a_schema_are_json_of_it(ending):
    pytest.importorskip("llguidance")
    rules = {"ok": {"type": "boolean"}, "who": {"enum": ["Ann", "Bob"]}}
    schema = {"type": "object", "properties": rules, "required": ["ok", "who"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    ask = {"messages": [USER], "temperature": 1, "seed": 3, "n": 2, "response_format": wanted}
    choices = httpx.post(f"{ending}/v1/chat/completions", json=ask, timeout=60).json()["choices"]
    flat = {"type": "json_schema", "name": "person", "schema": schema}
    other = httpx.post(f"{ending}/v1/responses", json={"input": [USER], "text": {"format": flat}}, timeout=60).json()
    claude = {"messages": [USER], "max_tokens": 60, "output_config": {"format": flat}}
    told = httpx.post(f"{ending}/v1/messages", json=claude, timeout=60).json()
    texts = [choice["message"]["content"] for choice in choices]
    texts += [other["output"][0]["content"][0]["text"], told["content"][0]["text"]]
    for answer in map(json.loads, texts):
        assert set(answer) == {"ok", "who"}
        assert answer["ok"] in (True, False)
        assert answer["who"] in ("Ann", "Bob")
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    refused = httpx.post(f"{ending}/v1/chat/completions", json=ask | {"response_format": wrong})
    assert "nonsense" in refused.json()["error"]["message"]


def test_a_tool_that_must_be_called_is(ending):
    pytest.importorskip("llguidance")
    towns = {"type": "object", "properties": {"town": {"$ref": "#/$defs/town"}}, "required": ["town"]}
    towns |= {"additionalProperties": False, "$defs": {"town": {"enum": ["Bonn", "Ulm"]}}}
    one, other = ({"name": name, "parameters": towns} for name in ("weather", "time"))
    ask = {"messages": [USER], "temperature": 1, "seed": 5, "n": 2, "max_tokens": 80}
    ask |= {"tools": [{"type": "function", "function": each} for each in (one, other)]}
    chat = httpx.post(f"{ending}/v1/chat/completions", json=ask | {"tool_choice": "required"}, timeout=60).json()
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["tool_calls"] * 2
    calls = [choice["message"]["tool_calls"][0]["function"] for choice in chat["choices"]]
    named = {"type": "function", "name": "time"}
    items = {"input": [USER], "tools": [{"type": "function", **each} for each in (one, other)], "tool_choice": named}
    calls += httpx.post(f"{ending}/v1/responses", json=items, timeout=60).json()["output"]
    tools = [{"name": each["name"], "input_schema": towns} for each in (one, other)]
    claude = {"messages": [USER], "max_tokens": 80, "tools": tools, "tool_choice": {"type": "tool", "name": "time"}}
    told = httpx.post(f"{ending}/v1/messages", json=claude, timeout=60).json()
    (use,) = told["content"]
    calls.append({"name": use["name"], "arguments": json.dumps(use["input"])})
    assert {call["name"] for call in calls[:2]} <= {"weather", "time"}
    assert [call["name"] for call in calls[2:]] == ["time", "time"]
    assert all(json.loads(call["arguments"])["town"] in ("Bonn", "Ulm") for call in calls)
    assert told["stop_reason"] == "tool_use"
    wrong = httpx.post(f"{ending}/v1/messages", json=claude | {"tool_choice": {"type": "tool", "name": "stocks"}})
    assert wrong.json()["error"]["message"] == "tool_choice wants the tool 'stocks', which tools do not describe."


def test_a_grammar_follows_several_answers_and_reads_each_token_once():
    pytest.importorskip("llguidance")
    model = ending_model("<tool_call>")
    tools = [{"type": "function", "function": {"name": name}} for name in ('say "ä"', "go")]
    allowed = allowed_tokens(model, of_call(model, tools, ToolChoice("required")), 2)
    texts = [f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>' for name in ('"say \\"ä\\""', '"go"')]
    answers = [[*model.tokenizer.encode(text), 256] for text in texts]
    for number in range(max(map(len, answers))):
        for tokens in answers:
            if number < len(tokens):
                bits = np.unpackbits(allowed(tokens[:number]).view(np.uint8), bitorder="little")
                assert bits[tokens[number]], model.tokenizer.decode(tokens[:number])
    assert [calls_in(text)[1] for text in texts] == [[Call('say "ä"', "{}")], [Call("go", "{}")]]


@pytest.mark.parametrize(
    "wanted", ["always", {"type": "function"}, {"type": "function", "function": "f"}, {"type": []}]
)
def test_a_choice_of_tools_is_one_of_four(wanted):
    with pytest.raises(ApiError, match="tool_choice must be auto, none, required or name a tool, got"):
        choice_of(wanted)


def test_a_conversation_is_cut_before_the_last_user_s_turn():
    model = byte_model(TEMPLATE)
    said = [USER, {"role": "assistant", "content": "Ann."}, {"role": "user", "content": "And who is he?"}]
    prompt = of_conversation(model, ChatPrompt(said))
    parts = [model.tokenizer.decode(part) for part in (prompt.shared, prompt.rest)]
    assert parts == ["<user>Who are you?<assistant>Ann.", "<user>And who is he?<assistant>"]
    assert of_conversation(model, ChatPrompt(said[:1])).shared == []
    plain = of_conversation(byte_model(), ChatPrompt(said, cut=(0, 3)))
    assert [model.tokenizer.decode(part) for part in (plain.shared, plain.rest)] == [
        "Who",
        " are you?Ann.\n\nAnd who is he?",
    ]


def test_a_template_that_writes_messages_anew_shares_nothing():
    upper = "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"
    said = [{"role": "system", "content": "Be brief."}, USER]
    model = byte_model(upper)
    assert of_conversation(model, ChatPrompt(said)) == Prompt(
        [], model.tokenizer.encode("Be brWho a"), text="Be brWho a"
    )


def test_tools_need_a_template_that_knows_them():
    with pytest.raises(ValueError, match="knows no tools"):
        of_conversation(byte_model("{{ messages[0].content }}"), ChatPrompt([USER], None, {"tools": [FUNCTION]}))


def test_blocks_stand_a_blank_line_apart():
    assert joined(["a\n", "b", "c"], [False, True, False]) == ("a\n\nb\n\nc", 4)
    assert joined([], []) == ("", None)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("It rains.", "It rains.", []),
        ('Wait. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "Wait.", [Call("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {}}', "", [Call("f", "{}")]),
        ("{no call}", "{no call}", []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    ],
)
def test_calls_are_found_and_never_shown_before(text, shown, calls):
    assert calls_in(text) == (shown, calls)
    for end in range(len(text)):
        assert shown.startswith(visible(text[:end]))
