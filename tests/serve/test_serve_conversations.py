"""Conversations over HTTP, by OpenAI's and Anthropic's own clients: what was read or said is not read again."""

from dataclasses import replace

import anthropic
import openai
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.serve import Settings, make_server, warm_up
from clusterkv_jax.serve.text_keys import key_of
from tests.support.byte_model import byte_model
from tests.support.server import TEMPLATE, running, wait_for

NAME, NEW = "bytes", 8
SYSTEM = "You answer in a word or two, and never ask anything back. "
QUESTIONS = ("Who are you?", "Where were you born?", "And when?")


@pytest.fixture(scope="module")
def server():
    """Of a model that says letters, digits and signs: other bytes are no text."""
    model = byte_model(TEMPLATE)
    embed = model.params["embed"].at[94:].set(0)
    model = replace(model, params=model.params | {"embed": embed})
    return make_server(model, Settings(NAME), slots=2, max_tokens=448, reserve=96, method="full")


@pytest.fixture(scope="module")
def address(server):
    warm_up(server)
    with running(server) as address:
        yield address


@pytest.fixture
def client(address, server):
    server.contexts.clear()
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(server, text):
    """What `generate` says of a text that it reads anew."""
    tokens = server.model.tokenizer.encode(text)
    return ckv.generate(server.model, [tokens], method="full", max_new_tokens=NEW).texts[0]


def test_a_history_that_is_sent_again_is_not_read_again(client, server):
    """The answer's last token is in no cache, so it is read with the next message."""
    messages, seen, text = [{"role": "system", "content": SYSTEM}], 0, f"<system>{SYSTEM}"
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        text += f"<user>{question}<assistant>"
        how = {"model": NAME, "temperature": 0, "max_completion_tokens": NEW}
        done = client.chat.completions.create(messages=messages, **how)
        answer = done.choices[0].message.content
        assert answer == alone(server, text)
        assert done.usage.prompt_tokens == len(server.model.tokenizer.encode(text))
        assert done.usage.prompt_tokens_details.cached_tokens == seen
        seen = done.usage.prompt_tokens + NEW - 1
        messages.append({"role": "assistant", "content": answer})
        text += answer
        assert turn == 0 or key_of(text) in server.contexts


def test_tokens_of_a_text_that_is_there_are_not_made_again(client, server, monkeypatch):
    """Of a long text that takes longer than its answer."""
    encode, lengths = server.model.tokenizer.encode, []
    monkeypatch.setattr(
        server.model.tokenizer, "encode", lambda text, **how: lengths.append(len(text)) or encode(text, **how)
    )
    messages, how = [{"role": "user", "content": QUESTIONS[1] + SYSTEM * 2}], {"model": NAME, "temperature": 0}
    said = client.chat.completions.create(messages=messages, max_completion_tokens=NEW, **how)
    assert max(lengths) > len(SYSTEM * 2)
    lengths.clear()
    messages += [{"role": "assistant", "content": said.choices[0].message.content}]
    messages += [{"role": "user", "content": QUESTIONS[0]}]
    client.chat.completions.create(messages=messages, max_completion_tokens=NEW, **how)
    assert 0 < max(lengths) <= len(f"<user>{QUESTIONS[0]}<assistant>")


def test_a_prompt_that_is_asked_again_is_not_read_again(client, server):
    ask = [{"role": "user", "content": SYSTEM + QUESTIONS[0]}]
    how = {"model": NAME, "messages": ask, "temperature": 0, "max_completion_tokens": NEW}
    first, second = (client.chat.completions.create(**how) for _ in range(2))
    cached = [done.usage.prompt_tokens_details.cached_tokens for done in (first, second)]
    assert cached == [0, second.usage.prompt_tokens]
    texts = [done.choices[0].message.content for done in (first, second)]
    assert texts == [alone(server, f"<user>{SYSTEM}{QUESTIONS[0]}<assistant>")] * 2


def test_what_a_client_broke_off_is_not_read_again(client, server):
    """It has seen a part of an answer, which stands in no cache alone."""
    ask = [{"role": "user", "content": SYSTEM * 2}]
    how = {"model": NAME, "temperature": 0}
    with client.chat.completions.create(messages=ask, max_completion_tokens=90, stream=True, **how) as stream:
        said = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
    wait_for(lambda: server.served.stats().active == 0)
    ask += [{"role": "assistant", "content": said}, {"role": "user", "content": QUESTIONS[0]}]
    done = client.chat.completions.create(messages=ask, max_completion_tokens=NEW, **how)
    text = f"<user>{SYSTEM * 2}<assistant>"
    assert done.usage.prompt_tokens_details.cached_tokens == len(text)
    assert done.choices[0].message.content == alone(server, f"{text}{said}<user>{QUESTIONS[0]}<assistant>")


def test_a_stream_and_a_breakpoint_go_on_from_the_last_answer(client, address, server):
    messages = [{"role": "user", "content": f"{SYSTEM}{QUESTIONS[0]}"}]
    stream = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_completion_tokens=NEW, stream=True
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    block = {"type": "text", "text": QUESTIONS[1] + SYSTEM[:30], "cache_control": {"type": "ephemeral"}}
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [block]}]
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude:
        how = {"max_tokens": NEW, "extra_body": {"temperature": 0}}
        told = [claude.messages.create(model=NAME, messages=messages, **how) for _ in range(2)]
    first, second = (one.usage for one in told)
    kept = len(server.model.tokenizer.encode(f"<user>{SYSTEM}{QUESTIONS[0]}<assistant>")) + NEW - 1
    written = 1 + len(server.model.tokenizer.encode(f"<user>{block['text']}"))
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (kept, written)
    assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (kept + written, 0)
    texts = [one.content[0].text for one in told]
    expected = alone(server, f"<user>{SYSTEM}{QUESTIONS[0]}<assistant>{said}<user>{block['text']}<assistant>")
    assert texts == [expected, expected]


def test_a_message_longer_than_a_slot_has_room_for_enters_behind_what_is_there(client, server):
    messages = [{"role": "user", "content": SYSTEM * 2}]
    how = {"model": NAME, "temperature": 0, "max_completion_tokens": NEW}
    said = client.chat.completions.create(messages=messages, **how).choices[0].message.content
    long = "w" * 100
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": long}]
    done = client.chat.completions.create(messages=messages, **how)
    text = f"<user>{SYSTEM * 2}<assistant>{said}<user>{long}<assistant>"
    assert done.choices[0].message.content == alone(server, text)
    assert done.usage.prompt_tokens_details.cached_tokens > len(SYSTEM * 2)


def test_a_response_goes_on_from_an_earlier_one(client):
    how = {"model": NAME, "temperature": 0, "max_output_tokens": NEW, "instructions": SYSTEM}
    first = client.responses.create(input=QUESTIONS[0], **how)
    second = client.responses.create(input=QUESTIONS[1], previous_response_id=first.id, **how)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.input_tokens + NEW - 1


def test_a_compacted_conversation_is_an_item_that_names_its_context(client, server):
    how = {"model": NAME, "temperature": 0, "max_output_tokens": NEW}
    first = client.responses.create(input=QUESTIONS[0] * 4, **how)
    compacted = client.responses.compact(model=NAME, previous_response_id=first.id)
    (item,) = compacted.output
    assert (compacted.object, item.type) == ("response.compaction", "compaction")
    assert compacted.usage.input_tokens_details.cached_tokens == compacted.usage.input_tokens
    assert compacted.usage.input_tokens == first.usage.input_tokens + NEW - 1
    ask = [{"role": "user", "content": QUESTIONS[1]}]
    later = client.responses.create(input=[item.model_dump(), *ask], **how)
    assert later.usage.input_tokens_details.cached_tokens == compacted.usage.input_tokens
    whole = client.responses.create(input=ask, previous_response_id=first.id, **how)
    assert later.output_text == whole.output_text
    text = f"<user>{QUESTIONS[0] * 4}<assistant>{first.output_text}<user>{QUESTIONS[1]}<assistant>"
    assert later.output_text == alone(server, text)


def test_a_text_that_was_not_there_is_read_once_to_be_compacted(client):
    turns = [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": "Yes."}]
    first, second = (client.responses.compact(model=NAME, input=turns) for _ in range(2))
    tokens = len(f"<user>{SYSTEM}<assistant>Yes.")
    details = [one.usage.input_tokens_details for one in (first, second)]
    assert [(one.cached_tokens, one.cache_write_tokens) for one in details] == [(0, tokens), (tokens, 0)]
    assert first.output[0].encrypted_content == second.output[0].encrypted_content


def test_what_leaves_the_store_while_it_is_extended_is_extended(client, server, monkeypatch):
    """There is room for one text: the longer one takes the place of its beginning before that is asked."""
    turns = [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": "Yes."}]
    client.responses.compact(model=NAME, input=turns)
    monkeypatch.setitem(vars(server), "settings", replace(server.settings, shared_contexts=1))
    told = client.responses.compact(model=NAME, input=[*turns, {"role": "user", "content": "Why?"}])
    details = told.usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (len(f"<user>{SYSTEM}<assistant>Yes."), 10)
    assert len(server.contexts) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_is_compacted_beyond_its_threshold(client, streams):
    how = {"model": NAME, "temperature": 0, "max_output_tokens": NEW}
    managed = [{"type": "compaction", "compact_threshold": 100}]
    kinds, counts, items = [], [], []
    for question in QUESTIONS[:2]:
        asked = [*items, {"role": "user", "content": SYSTEM[:30] + question}]
        if streams:
            events = list(client.responses.create(input=asked, context_management=managed, stream=True, **how))
            done = events[-1].response
            items_done = [event.item.type for event in events if event.type == "response.output_item.done"]
            assert items_done == [item.type for item in done.output]
        else:
            done = client.responses.create(input=asked, context_management=managed, **how)
        items = [*asked, *(item.model_dump(exclude_none=True) for item in done.output)]
        kinds.append([item.type for item in done.output])
        counts.append(done.usage.input_tokens_details.cached_tokens)
    assert kinds == [["message"], ["message", "compaction"]]
    assert counts[0] == 0 < counts[1]
    last = client.responses.create(input=[items[-1], {"role": "user", "content": "Why?"}], **how)
    assert last.usage.input_tokens_details.cached_tokens == done.usage.input_tokens + NEW - 1


@pytest.mark.parametrize("streams", [False, True])
def test_claude_s_conversation_is_compacted_behind_an_answer(client, address, server, streams):
    edits = [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 120}}]
    how = {"model": NAME, "max_tokens": NEW, "system": SYSTEM, "context_management": {"edits": edits}}
    how |= {"extra_body": {"temperature": 0}}
    kinds, messages = [], []
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            if streams:
                with claude.beta.messages.stream(messages=messages, **how) as stream:
                    done = stream.get_final_message()
            else:
                done = claude.beta.messages.create(messages=messages, **how)
            kinds.append([block.type for block in done.content])
            answer = [block.model_dump(exclude_none=True) for block in done.content]
            # What stands before a compaction need not be sent.
            messages = [{"role": "assistant", "content": answer}] if len(answer) > 1 else [*messages, done.to_dict()]
            messages = [{name: each[name] for name in ("role", "content")} for each in messages]
        assert kinds == [["text"], ["text", "compaction"], ["text", "compaction"]]
        counted = claude.messages.count_tokens(model=NAME, system=SYSTEM, messages=messages)
    cached = done.usage.cache_read_input_tokens or 0
    assert counted.input_tokens > cached > len(SYSTEM) + len(QUESTIONS[0])


def test_what_cannot_be_compacted_is_refused(client, address):
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude:
        ask = {"model": NAME, "max_tokens": NEW, "messages": [{"role": "user", "content": "Why?"}]}
        edit = {"type": "compact_20260112", "pause_after_compaction": True}
        with pytest.raises(anthropic.BadRequestError, match="pause_after_compaction = True is not supported"):
            claude.beta.messages.create(**ask, context_management={"edits": [edit]})
        ask["messages"].insert(0, {"role": "assistant", "content": [{"type": "compaction", "encrypted_content": "0"}]})
        with pytest.raises(anthropic.NotFoundError, match="There is no response '0'"):
            claude.beta.messages.create(**ask)
    unknown = {"type": "compaction", "encrypted_content": "0" * 64}
    with pytest.raises(openai.NotFoundError, match="is kept no longer; send the whole conversation"):
        client.responses.create(model=NAME, input=[unknown, {"role": "user", "content": "Why?"}])
    with pytest.raises(openai.BadRequestError, match="'summary' is not supported; compaction is"):
        client.responses.create(model=NAME, input="Why?", context_management=[{"type": "summary"}])
    with pytest.raises(openai.BadRequestError, match="exceed what the server has room for"):
        client.responses.compact(model=NAME, input="w" * 500)
    with pytest.raises(openai.BadRequestError, match="The input holds no message"):
        client.responses.compact(model=NAME)
