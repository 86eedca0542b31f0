"""A server asked by OpenAI's and Anthropic's own clients: answers are those of `generate`."""

import json

import anthropic
import httpx
import openai
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.serve import Settings, make_server, warm_up
from tests.support.byte_model import byte_model
from tests.support.server import TEMPLATE, running, wait_for

KEY, NAME = "a key of ours", "bytes"
SYSTEM = "You answer in a word or two, and never ask anything back. "
USER = {"role": "user", "content": "Who are you?"}
MESSAGES = [{"role": "system", "content": SYSTEM}, USER]


@pytest.fixture(scope="module")
def server():
    settings = Settings(NAME, ("another", KEY), max_body_bytes=2**16)
    room = {"slots": 2, "max_tokens": 256, "reserve": 128, "max_waiting": 4}
    return make_server(byte_model(TEMPLATE), settings, method=ckv.StreamingLLM(ckv.Budget(tokens=48)), **room)


@pytest.fixture(scope="module")
def address(server):
    warm_up(server)
    with running(server) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(address):
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(address):
    with httpx.Client(base_url=address, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def expected(server, shared, rest, max_new_tokens=12, **how):
    """What `generate` says of a prompt whose beginning is compressed before the rest is known."""
    method = server.engine.method
    given = {"method": method, "keep_short": True, "max_new_tokens": max_new_tokens, **how}
    return ckv.generate(server.model, [shared], question=rest, **given)


@pytest.fixture(scope="module")
def answer(server):
    """To `MESSAGES`."""
    return expected(server, f"<system>{SYSTEM}", f"<user>{USER['content']}<assistant>")


def test_a_chat_is_answered_as_generate_does_and_its_beginning_is_read_once(client, answer):
    first, second = (
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_completion_tokens=12)
        for _ in range(2)
    )
    shared = len(f"<system>{SYSTEM}")
    assert first.choices[0].message.content == second.choices[0].message.content == answer.texts[0]
    assert (first.choices[0].finish_reason, first.choices[0].message.role) == ("length", "assistant")
    assert first.usage.completion_tokens == 12
    assert first.usage.prompt_tokens == shared + len("<user>Who are you?<assistant>")
    assert second.usage.prompt_tokens_details.cached_tokens == shared
    details = [one.usage.prompt_tokens_details for one in (first, second)]
    assert [one.cached_tokens + one.cache_write_tokens for one in details] == [shared, shared]


def test_a_stream_of_a_chat_is_the_same_answer_in_pieces(client, answer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=12, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.texts[0]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 12


def test_a_completion_continues_text_and_ids_alike(client, server):
    text = "The sea was calm, and nobody spoke."
    told = expected(server, text, None)
    asked = [text, list(server.model.tokenizer.encode(text))]
    for prompt in asked:
        done = client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
        assert done.choices[0].text == told.texts[0]
    stream = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == told.texts[0]


def test_seeds_decide_what_is_drawn(client, server):
    ask = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9, "top_p": 0.95}
    texts = [client.completions.create(**ask, seed=7).choices[0].text for _ in range(2)]
    drawing = ckv.Sampling(temperature=0.9, top_p=0.95)
    assert texts == 2 * expected(server, ask["prompt"], None, sampling=drawing, seed=7).texts


def test_several_answers_have_seeds_that_follow_each_other(client, server):
    ask = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9}
    done = client.completions.create(**ask, seed=7, n=2)
    drawing = ckv.Sampling(temperature=0.9)
    told = [expected(server, ask["prompt"], None, sampling=drawing, seed=seed).texts[0] for seed in (7, 8)]
    assert [choice.text for choice in done.choices] == told
    assert done.usage.completion_tokens == 24


def test_log_probabilities_are_the_model_s(client):
    ask = {"model": NAME, "temperature": 0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=[USER], logprobs=True, top_logprobs=3, **ask)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:  # greedy
        assert [each.logprob for each in token.top_logprobs] == sorted(e.logprob for e in token.top_logprobs)[::-1]
        assert token.logprob == token.top_logprobs[0].logprob < 0
    stream = client.chat.completions.create(messages=[USER], logprobs=True, stream=True, **ask)
    pieces = [piece for chunk in stream if chunk.choices[0].logprobs for piece in chunk.choices[0].logprobs.content]
    assert [piece.logprob for piece in pieces] == pytest.approx([token.logprob for token in content])
    text = f"<user>{USER['content']}<assistant>"
    plain = client.completions.create(prompt=text, logprobs=1, **ask).choices[0].logprobs
    assert plain.token_logprobs == pytest.approx([token.logprob for token in content])
    assert plain.text_offset[0] == 0


def test_a_bias_decides_and_a_penalty_counts(client, http):
    ask = {"model": NAME, "prompt": "Once", "max_tokens": 6, "temperature": 0}
    letter = "A"
    (token,) = http.post("/tokenize", json={"prompt": letter}).json()["tokens"]
    biased = client.completions.create(**ask, logit_bias={str(token): 100})
    assert biased.choices[0].text == 6 * letter
    varied = client.completions.create(**ask, logit_bias={str(token): 100}, extra_body={"repetition_penalty": 1000})
    assert varied.choices[0].text != 6 * letter


def test_an_answer_ends_before_a_stop_string(client, claude, answer):
    stop = answer.texts[0].strip("\ufffd")[3:5]
    before = answer.texts[0][: answer.texts[0].index(stop)]
    done = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=12, stop=stop)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (before, "stop")
    told = claude.messages.create(
        model=NAME, max_tokens=12, system=SYSTEM, messages=[USER], stop_sequences=["never", stop]
    )
    assert (told.content[0].text, told.stop_reason, told.stop_sequence) == (before, "stop_sequence", stop)


def test_a_breakpoint_ends_what_is_shared(client, server):
    book = "Call me Ishmael. Some years ago, never mind how long, I went to sea. "
    blocks = [
        {"type": "text", "text": book, "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "text", "text": "Who?"},
    ]
    ask = {"model": NAME, "messages": [{"role": "user", "content": blocks}], "temperature": 0, "max_tokens": 12}
    done = [client.chat.completions.create(**ask) for _ in range(2)]
    told = expected(server, f"<user>{book}", "\n\nWho?<assistant>").texts[0]
    assert [one.choices[0].message.content for one in done] == [told, told]
    assert done[1].usage.prompt_tokens_details.cached_tokens == len(f"<user>{book}")


def test_a_turn_reads_what_follows_the_context_that_is_there(client, server):
    system = {"role": "system", "content": "Long instructions stand before all conversations of ours."}
    said = [system, USER, {"role": "assistant", "content": "Ann."}, {"role": "user", "content": "And he?"}]
    ask = {"model": NAME, "temperature": 0, "max_tokens": 12}
    client.chat.completions.create(messages=said[:2], **ask)
    later = client.chat.completions.create(messages=said, **ask)
    shared = f"<system>{system['content']}"
    rest = f"<user>{USER['content']}<assistant>Ann.<user>And he?<assistant>"
    assert later.usage.prompt_tokens_details.cached_tokens == len(shared)
    assert later.choices[0].message.content == expected(server, shared, rest).texts[0]


def test_claude_s_messages_are_answered_as_generate_does(claude, answer):
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
    ]
    ask = {"model": NAME, "max_tokens": 12, "system": system, "messages": [USER]}
    told = claude.messages.create(**ask)
    assert (told.content[0].text, told.stop_reason) == (answer.texts[0], "max_tokens")
    assert told.usage.output_tokens == 12
    assert told.usage.cache_read_input_tokens + told.usage.cache_creation_input_tokens == len(f"<system>{SYSTEM}")
    with claude.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == answer.texts[0]
        assert stream.get_final_message().usage == told.usage.model_copy(
            update={"cache_read_input_tokens": len(f"<system>{SYSTEM}"), "cache_creation_input_tokens": 0}
        )
    counted = claude.messages.count_tokens(model=NAME, system=system, messages=[USER])
    assert counted.input_tokens == len(f"<system>{SYSTEM}<user>{USER['content']}<assistant>")


def test_claude_s_last_message_is_written_on(claude, server):
    begun = [USER, {"role": "assistant", "content": "I am"}]
    told = claude.messages.create(model=NAME, max_tokens=12, messages=begun)
    assert told.content[0].text == expected(server, f"<user>{USER['content']}<assistant>I am", None).texts[0]


def test_responses_go_on_from_earlier_ones(client, answer):
    ask = {"model": NAME, "instructions": SYSTEM, "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input=USER["content"], **ask)
    assert (first.output_text, first.status) == (answer.texts[0], "incomplete")
    later = client.responses.create(input="Why?", previous_response_id=first.id, **ask)
    said = [USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Why?"}]
    whole = client.responses.create(input=said, **ask)
    assert later.output_text == whole.output_text
    assert later.usage.input_tokens == whole.usage.input_tokens


def test_events_of_a_response_make_up_the_response(client, answer):
    ask = {"model": NAME, "instructions": SYSTEM, "temperature": 0, "max_output_tokens": 12}
    with client.responses.stream(input=USER["content"], **ask) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.texts[0]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.texts[0]


def test_tools_and_their_results_stand_in_the_template(http):
    function = {"name": "weather", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bonn"}'}}
    asked = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    ask = {"messages": asked, "max_tokens": 1, "tools": [{"type": "function", "function": function}]}
    told = http.post("/v1/chat/completions", json=ask)
    text = "[weather]<user>Who are you?<assistant>(weather town)<tool>rain<assistant>"
    assert told.json()["usage"]["prompt_tokens"] == len(text)
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"town": "Bonn"}}
    blocks = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
    ]
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    told = http.post("/v1/messages/count_tokens", json={"messages": blocks, "tools": tools})
    assert told.json()["input_tokens"] == len(text)
    items = [
        USER,
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"town": "Bonn"}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    ask = {"input": items, "tools": [{"type": "function", **function}], "max_output_tokens": 1}
    assert http.post("/v1/responses", json=ask).json()["usage"]["input_tokens"] == len(text)


def test_errors_are_those_that_clients_know(address, client, claude):
    ask = {"model": NAME, "messages": [USER]}
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="guessed").models.list()
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        claude.with_options(api_key="guessed").messages.create(**ask, max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; 'bytes' is"):
        client.chat.completions.create(messages=[USER], model="gpt-9")
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        claude.messages.create(messages=[USER], model="opus", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="exceed what the server has room for") as caught:
        client.chat.completions.create(**ask, max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**ask, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="token that ends a text"):
        client.chat.completions.create(**ask, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**ask, tool_choice="required")
    with pytest.raises(openai.APIStatusError, match="64 KiB") as large:
        client.completions.create(model=NAME, prompt="x" * 2**17)
    assert large.value.status_code == 413
    with pytest.raises(openai.NotFoundError, match="resp_0"):
        client.responses.create(model=NAME, input="Why?", previous_response_id="resp_0")
    assert httpx.get(f"{address}/v1/nothing").json()["error"]["message"] == "There is no /v1/nothing here."


def test_what_is_not_the_client_s_fault_is_the_server_s(client, server, monkeypatch):
    def broken(*_, **__):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(server.engine._core.runner, "insert", broken)
    ask = {"model": NAME, "prompt": "Once", "max_tokens": 2}
    with pytest.raises(openai.InternalServerError, match=r"The server failed; its log says more\.$"):
        client.completions.create(**ask)
    with pytest.raises(openai.APIError, match=r"The server failed; its log says more\.$"):
        list(client.completions.create(**ask, stream=True))
    monkeypatch.undo()
    assert client.completions.create(**ask).usage.completion_tokens == 2


def test_clients_that_leave_free_their_slots(http, server):
    ask = {"messages": MESSAGES, "stream": True, "max_tokens": 80, "temperature": 0}
    before = server.served.stats().cancelled
    for _ in range(3):
        with http.stream("POST", "/v1/chat/completions", json=ask) as response:
            next(response.iter_bytes())
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=ask | {"stream": False}, timeout=0.01)
    wait_for(lambda: server.served.stats().active == server.served.stats().waiting == 0)
    assert server.served.stats().cancelled > before


def test_what_the_server_says_of_itself(http, address):
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": ckv.__version__}
    assert http.get("/v1/models").json()["data"][0]["id"] == NAME
    assert http.get(f"/v1/models/{NAME}").json()["max_model_len"] == 256
    tokens = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    said = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert said == f"<system>{SYSTEM}<user>{USER['content']}<assistant>"
    counts = http.get("/metrics").text
    assert "clusterkv_num_requests_running 0.0" in counts
    assert "clusterkv_generation_tokens_total" in counts
    status = http.get("/status").json()
    assert (status["slots"], status["active"], status["model"]) == (2, 0, NAME)


def test_the_page_loads_nothing_from_elsewhere(address):
    page = httpx.get(address)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text


def test_a_line_of_the_log_has_no_word_of_the_text(http, caplog):
    with caplog.at_level("INFO", logger="clusterkv_jax.serve"):
        body = {"messages": [{"role": "user", "content": "Secret words"}], "max_tokens": 1, "user": "me", "store": True}
        http.post("/v1/chat/completions", content=json.dumps(body))
        wait_for(lambda: "/v1/chat/completions: 200" in caplog.text)
    assert "ignored: store, user" in caplog.text
    assert "Secret" not in caplog.text
