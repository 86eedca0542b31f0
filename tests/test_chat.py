"""A question in a chat template: the cut is where it should be, or there is one sentence."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clusterkv_jax.text.chat import Chat, cut_messages, cut_paragraphs, cut_turn, frame_ids, turn
from clusterkv_jax.text.tokenizer import encode
from tests.support.words import by_letters

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<assistant>"
CONTENT = "messages[0]['content']"


def tokenizer(template):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})), chat_template=template)


@pytest.mark.parametrize("sign", ["", "\u241e", "\u241e\u241e", "\U000f0000", "</user>", "{{ x }}"])
def test_no_character_moves_the_cut(sign):
    text, question = f"{sign}A text.{sign}", f"{sign}Who?{sign}"
    assert cut_turn(tokenizer(TEMPLATE), text, question) == (f"<user>{text}", f"{question}</user><assistant>")
    assert turn(tokenizer(TEMPLATE), text) == f"<user>{text}</user><assistant>"


def test_a_template_may_strip_a_message():
    assert cut_turn(tokenizer(f"<{{{{ {CONTENT} | trim }}}}>"), " A text. ", " Who? ") == ("<A text. ", " Who?>")


@pytest.mark.parametrize(
    "template",
    [
        f"{{{{ {CONTENT} }}}} {{{{ {CONTENT} }}}}",
        f"{{{{ {CONTENT} }}}}{{{{ {CONTENT}[:4] }}}}" + f"{{{{ {CONTENT} }}}}",
        f"{{{{ {CONTENT}[-3:] }}}}{{{{ {CONTENT} }}}}",  # the end of the question before the text
        f"{{{{ {CONTENT} | length }}}} {{{{ {CONTENT} }}}}",
        f"{{{{ {CONTENT}[:4] }}}}",
        f"{{{{ {CONTENT} }}}} {{{{ messages }}}}",
        f"{{{{ {CONTENT} | upper }}}}",
        "no message at all",
    ],
)
def test_a_message_is_shown_once_and_whole(template):
    with pytest.raises(ValueError, match=r"^The model's chat template must show a message once and whole to be cut"):
        cut_turn(tokenizer(template), "A text.", "Who?")


BROKEN = {
    "{% for %}": "Expected an expression",
    "{{ raise_exception('no users') }}": "no users",
    "{{ messages[0].nothing.more }}": "has no attribute 'nothing'",
    "{{ ''.__class__.__mro__ }}": "is unsafe",
    "{{ 1 / 0 }}": "division by zero",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ messages[0]['content'] + 1 }}": "can only concatenate",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_fails_is_one_sentence(template):
    with pytest.raises(ValueError, match=r"^The model's chat template fails: [^\n]*\.$") as error:
        cut_turn(tokenizer(template), "A text.", "Who?")
    assert BROKEN[template] in str(error.value)


@pytest.mark.parametrize("text", ["a b", "Paris"])
def test_a_frame_that_ends_in_a_space_is_found_before_every_text(text):
    """The space is a part of the text's first token."""
    words = ["<unk>", "[INST]", "\u2581", "\u2581[/INST]", "\u2581a", "\u2581b", "\u2581I", "\u2581Paris"]
    pieces = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    template = f"[INST] {{{{ {CONTENT} }}}} [/INST]"
    spaced = PreTrainedTokenizerFast(tokenizer_object=pieces, chat_template=template)
    assert frame_ids(spaced) == ((1,), (3,))
    assert encode(spaced, turn(spaced, text)) == [1, *encode(spaced, f" {text}"), 3]


TURNS = "{% for m in messages %}<{{ m['role'] }}>CONTENT</{{ m['role'] }}>{% endfor %}<assistant>"
SAID = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": " Ahab. "},
    {"role": "user", "content": "Where?"},
]


@pytest.mark.parametrize(
    ("content", "before", "plain"),
    [
        ("{{ m['content'] }}", "<user>Who?</user><assistant> Ahab. ", True),
        ("{{ m['content'] | trim }}", "<user>Who?</user><assistant>Ahab. ", False),
    ],
)
def test_messages_are_cut_within_a_content(content, before, plain):
    """A template that trims trims what stands at the end, which a cut is not."""
    found = cut_messages(tokenizer(TURNS.replace("CONTENT", content)), SAID, 1, len(" Ahab. "))
    assert found[:2] == (before, "</assistant><user>Where?</user><assistant>")
    assert (found[2] == before + found[1]) is plain


@pytest.mark.parametrize("content", ["{{ messages[0]['content'] }}", "{{ m['content'] }}{{ m['content'] }}", ""])
def test_nothing_is_before_a_cut_that_is_not_shown_once(content):
    before, after, plain = cut_messages(tokenizer(TURNS.replace("CONTENT", content)), SAID, 1, 3)
    assert (before, after) == ("", plain)


def test_a_system_stands_before_all_turns():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    before, after, _ = cut_messages(by_letters(template), SAID, 0, 2, Chat(system="Be brief."))
    assert (before, after) == ("<system>Be brief.<user>Wh", "o?<assistant> Ahab. <user>Where?<assistant>")


def test_without_a_template_messages_stand_a_blank_line_apart_and_answers_where_they_were_written():
    assert cut_paragraphs(SAID, 1, 3) == ("Who? Ah", "ab. \n\nWhere?", "Who? Ahab. \n\nWhere?")
