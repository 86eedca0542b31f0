"""Text in and out: special tokens once, chat templates and tokenizers within bounds, stops, streams, padding."""

import dataclasses
import functools
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import clusterkv_jax as ckv
from clusterkv_jax.cli.texts import read_text
from clusterkv_jax.text import prompts
from clusterkv_jax.text.chat import Chat, cut_turn
from clusterkv_jax.text.growing import NOTHING, grown
from clusterkv_jax.text.stops import Stops, finish_reason, make_stops, shorten, show, text_of
from clusterkv_jax.text.tokenizer import decode, encode, tokenizer_in
from tests.fuzz.rules import check_sentence
from tests.support.tiny import random_params, tiny
from tests.support.words import beside, by_letters, by_pieces

LETTERS, PIECES = by_letters(), by_pieces()
BEGIN, END, PAD = LETTERS.convert_tokens_to_ids(["<s>", "<|end|>", "<pad>"])


def ids(text):
    return [LETTERS.convert_tokens_to_ids(letter) for letter in text]


@functools.cache
def model():
    """A tiny random model that writes letters, and has a chat template."""
    config = dataclasses.replace(tiny().config, vocab_size=len(LETTERS))
    return ckv.Model(random_params(config), config, LETTERS, None, "letters")


# --- special tokens ---


def test_a_text_begins_once():
    for text in ("Hi", "<s>Hi"):
        assert encode(LETTERS, text, add_special_tokens=True) == [BEGIN, *ids("Hi")]
    (whole,), _ = prompts.encode_all(beside(LETTERS), ["Hi"], chat=Chat())
    assert whole == [BEGIN, *ids("<user>Hi"), END, *ids("<assistant>")]


def test_names_of_special_tokens_may_be_letters():
    as_tokens, as_letters = (
        prompts.encode_all(beside(LETTERS), ["a<|end|>b"], ["c<|end|>"], chat=chat, special_tokens=special)
        for special, chat in ((True, None), (False, None))
    )
    assert as_tokens == ([[BEGIN, *ids("a"), END, *ids("b")]], [[*ids("c"), END]])
    assert as_letters == ([[BEGIN, *ids("a<|end|>b")]], [ids("c<|end|>")])
    heads, tails = prompts.encode_all(beside(LETTERS), ["a<|end|>b"], ["c"], chat=Chat(), special_tokens=False)
    assert heads == [[BEGIN, *ids("<user>a<|end|>b")]]
    assert tails == [[*ids("\n\nc"), END, *ids("<assistant>")]]


# --- the chat template ---


@pytest.mark.parametrize(("text", "question", "between"), [("a", "b", 2), ("a\n", "b", 1), ("a\n\n", "b", 0)])
def test_a_blank_line_stands_between_text_and_question(text, question, between):
    assert prompts.gap(text, question) == "\n" * between
    heads, tails = prompts.encode_all(beside(LETTERS), [text], [question], chat=Chat())
    assert heads[0] + tails[0] == [BEGIN, *ids(f"<user>{text}{between * chr(10)}b"), END, *ids("<assistant>")]


def test_the_systems_message_and_arguments_of_the_template():
    chat = Chat("Be brief.", {"enable_thinking": False})
    assert cut_turn(LETTERS, "A text.", "Who?", chat) == (
        "<s><system>Be brief.<|end|><user>A text.",
        "Who?<|end|><assistant><no>",
    )


def test_a_context_is_asked_in_its_chat():
    chat = {"chat": True, "system": "Be brief."}
    engine = ckv.Engine(model(), max_tokens=128, reserve=64)
    context = engine.read("A text.", max_new_tokens=4, **chat)
    asked = engine.add(context, "Who?", max_new_tokens=4).result()
    alone = ckv.generate(model(), ["A text."], questions=["Who?"], max_new_tokens=4, **chat)
    assert (asked.tokens, asked.stats.question_tokens) == (alone.tokens, alone.stats.question_tokens)
    assert engine.add("A text.", "Who?", max_new_tokens=4, **chat).result().tokens == alone.tokens
    for question, options in ((None, {}), ("Who?", chat)):
        with pytest.raises(ValueError, match=r"needs a question in words|must be said where a context is read"):
            engine.add(context, question, **options)
    repeating = ckv.Engine(model(), method=ckv.KVzip(ckv.Budget(ratio=0.5), chunk=16), max_tokens=64, reserve=16)
    for ask in (repeating.add, repeating.read):
        with pytest.raises(ValueError, match="KVzip repeats prompts in the chat template as it stands"):
            ask("A text.", max_new_tokens=4, **chat)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chat": 1}, "chat must be True or False, got 1."),
        ({"system": "x"}, "they need chat=True."),
        ({"chat": True, "system": " "}, "system must be a text that is not empty or None"),
        ({"chat": True, "chat_template_kwargs": [1]}, "chat_template_kwargs must be values by name or None"),
        ({"special_tokens": None}, "special_tokens must be True or False, got None."),
        ({"chat": True, "prompts": [[1, 2]]}, r"prompt 0 must be a text to be part of a chat, got \[1, 2\]."),
    ],
)
@pytest.mark.wrong_arguments
def test_a_wrong_chat_is_named(options, said):
    with pytest.raises(ValueError, match=said):
        ckv.generate(model(), options.pop("prompts", ["a"]), **options)


def test_a_template_without_a_system_says_so():
    tokenizer = by_letters("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match=r"^The model's chat template does not print a system message; leave it out\."):
        cut_turn(tokenizer, "A text.", "Who?", Chat("Be brief."))
    with pytest.raises(ValueError, match="needs a model whose tokenizer has a chat template, and 'words' has none"):
        prompts.encode_all(beside(by_letters(None)), ["a"], chat=Chat())


LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "template",
    ["{{ 'x' | center(10**9) }}", "{{ 'x' * 10**10 }}", "{{ '%1000000000d' % 3 }}", "{{ lipsum(10**7) }}", LOOP],
)
def test_one_call_of_a_template_is_bounded_too(template):
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"^The model's chat template fails: [^\n]*\.$"):
        cut_turn(by_letters(template), "A text.", "Who?")
    assert time.process_time() - begin < 2  # what computes is another process


# --- tokenizers from outside ---

ORDINARY = json.loads(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str())
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
HOSTILE = {
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 64}},
    "one long replacement": {"normalizer": {**DOUBLING, "content": "a" * 10**5}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
}


def write(folder, changes):
    (folder / "tokenizer.json").write_text(json.dumps(ORDINARY | changes))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_sentence(name, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json makes no tokenizer: ") as error:
        tokenizer_in(write(tmp_path, HOSTILE[name]))
    check_sentence(str(error.value))


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a)*$^"}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_a_panic_is_one_sentence(changes, tmp_path):
    try:
        encode(tokenizer_in(write(tmp_path, changes)), "a " * 40, add_special_tokens=True)
    except ValueError as error:
        check_sentence(str(error))


@pytest.mark.parametrize("length", [8_000_000, 10**10])
def test_a_file_that_pads_is_read_without(length, tmp_path):
    """transformers pads only where it is asked to; millions of padding tokens would take ten seconds."""
    padding = {"strategy": {"Fixed": length}, "direction": "Right", "pad_to_multiple_of": None}
    padded = {"padding": padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}}
    begin = time.perf_counter()
    assert encode(tokenizer_in(write(tmp_path, padded)), "a", add_special_tokens=True) == [0]
    assert time.perf_counter() - begin < 10


def test_another_file_is_no_way_around_the_trial(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}')
    LETTERS.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="names fast_tokenizer_files"):
        tokenizer_in(tmp_path)


@pytest.mark.parametrize("name", ["conversations", "chat_template"])
def test_what_a_template_writes_is_no_argument_of_it(name):
    with pytest.raises(ValueError, match=f"must not name {name}, which"):
        prompts.as_chat(True, None, {name: 1})


def test_a_tokenizer_is_tried_once(tmp_path, monkeypatch):
    folder = write(tmp_path, {"added_tokens": []})
    assert tokenizer_in(folder).convert_tokens_to_ids("a") == 0
    monkeypatch.setattr("clusterkv_jax.text.guard.ask", lambda *_, **__: pytest.fail("tried again"))
    assert tokenizer_in(folder).convert_tokens_to_ids("a") == 0
    assert ckv.load("demo").tokenizer is not None  # the packaged one is trusted


# --- texts that cannot be read ---


def test_half_of_a_character_is_named():
    for options in ({}, {"questions": ["Who\udc80?"]}):
        text = "a" if options else "\udc80"
        with pytest.raises(ValueError, match=r"^(prompt|question) 0 holds half of a character, '\\udc80'"):
            ckv.generate(model(), [text], **options)


def test_a_text_is_refused_by_its_size_before_it_is_read(monkeypatch):
    monkeypatch.setattr(LETTERS, "encode", lambda *_, **__: pytest.fail("encoded"))
    with pytest.raises(ValueError, match=r"prompt 0 has 2,000,000 letters, far more than the model's 256 positions"):
        ckv.generate(model(), ["a " * 10**6])


def test_a_prompt_file_has_a_size_and_no_byte_order_mark(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfA text.")
    assert read_text(str(file)) == "A text."
    with file.open("wb") as stream:
        stream.truncate(2**26 + 1)
    with pytest.raises(ValueError, match=r"^Prompt file .* is larger than 64 MiB, the most that is read\.$"):
        read_text(str(file))


# --- what a tokenizer padded ---


def test_padding_is_no_text():
    texts = ["a longer text", "short"]
    alone = ckv.generate(model(), texts, max_new_tokens=3).tokens
    for side in ("left", "right"):
        padded = LETTERS(texts, padding=True, padding_side=side, return_tensors="np")
        assert ckv.generate(model(), padded, max_new_tokens=3).tokens == alone
        with pytest.raises(ValueError, match=f"prompt 1 begins or ends with the padding token {PAD}; give lists"):
            ckv.generate(model(), padded["input_ids"])
        with pytest.raises(ValueError, match="prompt 1 begins or ends with the padding token"):
            ckv.Engine(model(), max_tokens=64, reserve=8).generate(padded["input_ids"], max_new_tokens=3)
    with pytest.raises(ValueError, match="input_ids and no attention_mask"):
        ckv.generate(model(), {"input_ids": [[1, 2]]})


# --- stops ---


def test_why_a_text_ended():
    free = ckv.generate(model(), ["Some text"], max_new_tokens=8)
    (tokens,), (text,) = free.tokens, free.texts
    assert free.finish_reasons == ["length"]
    third = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    ends = dataclasses.replace(model(), config=dataclasses.replace(model().config, eos_ids=(tokens[third],)))
    cases = (
        (model(), {"stop_ids": [tokens[third]]}, "stop", text[:third]),
        (model(), {"stop": [text[third]]}, "stop", text[:third]),
        (ends, {}, "eos", text[: third + 1]),
    )
    for asked, options, why, said in cases:
        engine = ckv.Engine(asked, max_tokens=64, reserve=16)
        for result in (
            ckv.generate(asked, ["Some text"], max_new_tokens=8, **options),
            *engine.generate(["Some text"], max_new_tokens=8, **options),
        ):
            assert (result.finish_reasons, result.texts) == ([why], [said])
            assert result.tokens == [tokens[: third + 1]]
    handle = engine.add("Some text", max_new_tokens=8)
    handle.cancel()
    assert handle.result().finish_reasons == ["cancelled"]


def test_a_special_token_stops():
    stops = make_stops(LETTERS, ["<|end|>", "x"], [7], len(LETTERS))
    assert stops == Stops(("x",), frozenset({7, END}))
    tokens = [*ids("ab"), END, *ids("xc")]
    assert shorten(LETTERS, tokens, stops)
    assert tokens == [*ids("ab"), END]
    assert text_of(LETTERS, tokens, stops) == "ab"
    assert finish_reason(LETTERS, tokens, (), stops) == "stop"
    assert finish_reason(LETTERS, tokens, (END,), stops) == "eos"


@pytest.mark.parametrize("wrong", ["x", 5, [5.0], [True], ["x"], [-1], [10**6]])
@pytest.mark.wrong_arguments
def test_wrong_stop_ids_are_named(wrong):
    with pytest.raises(ValueError, match=r"^stop_ids "):
        ckv.generate(model(), ["a"], stop_ids=wrong)


# --- text out ---


def test_the_first_space_of_an_answer_stays():
    def pieces(*names):
        return PIECES.convert_tokens_to_ids(list(names))

    assert decode(PIECES, pieces("▁Paris", ".")) == " Paris."
    assert decode(PIECES, pieces("<s>", "▁", "▁a", "</s>")) == "  a"
    assert decode(PIECES, pieces("b", "▁a")) == "b a"
    assert decode(PIECES, []) == ""


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1) | st.sampled_from([3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0x80])),
    sizes=st.lists(st.integers(1, 4), min_size=1),
    strings=st.lists(st.sampled_from([" a", "Paris.", "\n", "😀", ". b"]), max_size=2),
    grows=st.booleans(),
)
def test_what_was_shown_is_what_stands_there(tokens, sizes, strings, grows):
    stops, shown, before, at, known = Stops(tuple(strings)), [], "", 0, NOTHING

    def pass_on(_, text):
        return shown.append(text)

    said = []
    for number in range(len(tokens) + 1):
        at = min(len(tokens), at + sizes[number % len(sizes)])
        said = tokens[:at]
        last = shorten(PIECES, said, stops, known) or at == len(tokens)
        known = grown(PIECES, said, known) if grows and not last else known
        before = show(PIECES, 0, said, before, stops, last, pass_on, known)
        if last:
            break
    assert "".join(shown) == text_of(PIECES, said, stops)
    whole = tokens[:at]
    assert shorten(PIECES, whole, stops) or at == len(tokens)
    assert whole == said


def test_a_text_that_grows_is_decoded_once(monkeypatch):
    decoded, plain = [], PIECES.decode
    monkeypatch.setattr(PIECES, "decode", lambda ids, **how: decoded.append(len(ids)) or plain(ids, **how))
    said, shown, known, stops = [], "", NOTHING, Stops((" b a",))
    for token in PIECES.convert_tokens_to_ids(["▁Paris", "▁a", "b", "."]) * 100:
        said.append(token)
        assert not shorten(PIECES, said, stops, known)
        known = grown(PIECES, said, known)
        shown = show(PIECES, 0, said, shown, stops, False, lambda *_: None, known)
    assert shown == 100 * " Paris ab."
    assert max(decoded) < 8


def test_a_run_of_bytes_waits_for_its_end():
    smile = [3 + byte for byte in "😀".encode()]
    (word,) = PIECES.convert_tokens_to_ids(["the"])
    shown: list[str] = []
    before = ""
    for count in range(1, 7):
        said = [*smile, 3 + 0xF0, word][:count]
        before = show(PIECES, 0, said, before, Stops(), count == 6, lambda _, text: shown.append(text))
    assert "".join(shown) == decode(PIECES, said)


def test_a_tokenizer_that_fails_is_named():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="none")))
    with pytest.raises(ValueError, match=r"^The tokenizer of '.*' fails: "):
        encode(tokenizer, "b")


def test_questions_are_as_many_as_prompts():
    with pytest.raises(ValueError, match="Questions must be one per prompt, got 2 for 1 prompts"):
        ckv.generate(model(), ["a"], questions=np.asarray([[1], [2]]))
