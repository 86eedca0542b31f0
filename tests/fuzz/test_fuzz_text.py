"""Tokenizers and chat templates that are almost right, or hostile: a result, or one sentence, in bounded time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkv_jax.text.chat import cut_turn, turn
from clusterkv_jax.text.tokenizer import decode, encode, tokenizer_in
from tests.fuzz.mutations import mutated
from tests.fuzz.rules import one_sentence
from tests.support.words import by_letters, by_pieces

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PARTS = [
    *("{{ messages[0]['content'] }}", "{{ messages[0].content[-3:] }}", "{{ messages }}", "{{ x }}", "{{ x.y }}"),
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content | upper }}", "{% if x %}", "{% else %}", "{% endif %}"),
    *("{{ raise_exception('no') }}", "{{ ''.__class__ }}", "{{ 1 / 0 }}", "{{ range(10**9) }}", "{% set x = 1 %}"),
    *("{{ messages | tojson }}", "{% generation %}", "{% endgeneration %}", "{# ", " #}", "{{", "%}", "\U000f0000"),
    *("{% include 'x' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ strftime_now('%Y') }}", "text"),
    *("{{ 'x' | center(10**9) }}", "{{ messages[0].content * 10**9 }}", "{{ '%999999999d' % 1 }}", "{{ 9**9**9 }}"),
    *("{{ lipsum(10**6) }}", "{{ 'x y' | wordwrap(1) }}", "{% set x = 'x' * 99 %}", "{% for i in range(99999) %}"),
    *(
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'.replace('', 'b' * 10**6) }}",
        "{{ x ~ x }}",
        "{{ 'x' | indent(10**8) }}",
    ),
]
REGEX = {"type": "Split", "pattern": {"Regex": "(a|a|.)*[^a]$"}, "behavior": "Removed", "invert": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
# What a mutation may turn into something that never ends: rules of every kind.
RICH = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "NFKC"}, DOUBLING, {"type": "Prepend", "prepend": "▁"}],
    },
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [REGEX, {"type": "FixedLength", "length": 5}]},
    "padding": {
        **{"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    },
}


def small(tokenizer):
    """The file of a tokenizer with a small vocabulary."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = dict(list(described["model"]["vocab"].items())[:120])
    described["model"]["vocab"] = kept | {"<unk>": len(kept), "▁": len(kept) + 1, "▁a": len(kept) + 2}
    return described


FILES = {"letters": small(by_letters()), "pieces": small(by_pieces()), "rich": small(by_letters()) | RICH}


@given(template=st.one_of(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), mutated(TEMPLATE, "bytes")))
def test_chat_templates(template):
    text = template if isinstance(template, str) else template.decode("utf-8", "replace")
    tokenizer = by_letters(text)
    parts, _ = one_sentence(lambda: cut_turn(tokenizer, "A text.", "Who?"))
    if parts is not None:
        assert "Who?" not in parts[0]
        assert parts[1].startswith("Who?")
        assert "".join(parts) == turn(tokenizer, "A text.Who?")


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_tokenizers(tmp_path_factory, name, data):
    folder = tmp_path_factory.getbasetemp() / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(data.draw(mutated(json.dumps(FILES[name]), "json")))

    def use():
        tokenizer = tokenizer_in(folder)
        tokens = encode(tokenizer, "A text, and another 12.\n" + "a" * 60, add_special_tokens=True)
        return decode(tokenizer, tokens[:50])

    text, _ = one_sentence(use)
    assert text is None or isinstance(text, str)
