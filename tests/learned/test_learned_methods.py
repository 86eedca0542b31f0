"""KVzip and KVzap: scores of a repetition, and those that a surrogate predicts, decide which rows stay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax import learned
from clusterkv_jax.blocks import attention_in
from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.cache.pages import from_pages
from clusterkv_jax.evaluation.responses import likelihoods
from clusterkv_jax.evaluation.tasks.cases import EncodedPrompt
from clusterkv_jax.generation.batch import make_batch
from clusterkv_jax.generation.generate import compile_ahead
from clusterkv_jax.learned.repetition import prompts as repeat_prompts
from clusterkv_jax.models import decoder
from clusterkv_jax.text.chat import frame_ids
from tests.support.byte_model import byte_tokenizer
from tests.support.gpu_blocks import counted, take_gpu
from tests.support.tiny import EXTEND, VOCAB, padded, prompt, random_params, tiny, with_surrogate
from tests.support.tiny import prefill as tiny_prefill
from tests.support.words import by_letters

WORDS = ((3, 5), (7, 1, 4), (2,))
BUDGET = ckv.Budget(tokens=12)
ZIP = ckv.KVzip(BUDGET, sinks=2, recent=1, chunk=16, instruction=WORDS)
PLUS = dataclasses.replace(ZIP, plus=True)
LAYER = dataclasses.replace(ZIP, scope="layer")
CHATTING = by_letters("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<bot>")
PROMPTS = [prompt(1, 40), prompt(2, 21), prompt(3, 15)]


def prefill(method, texts, model=None, width=40, padding=0, **options):
    return tiny_prefill(method, *texts, model=model, width=width, fill=padding, **options)


def held(layer, row=0):
    """Positions that each head of a sequence holds."""
    if isinstance(layer, ckv.PagedHeads):
        layer = from_pages(layer, int(layer.length.max()))
    counts = np.asarray(layer.length[row])
    return [set(head[:count].tolist()) for head, count in zip(np.asarray(layer.positions[row]), counts, strict=True)]


def best(scores, rows, sinks, recent):
    """The first and last rows, and the best of the others, `rows` in all."""
    scores = np.array(scores, np.float64)
    scores[:sinks] = scores[len(scores) - recent :] = np.inf
    return set(np.argsort(-scores, kind="stable")[:rows].tolist())


# --- KVzip ---


def repetition(method, text):
    """What `reconstruction` says of each layer of one prompt."""
    small, tokens = tiny(), jnp.asarray([text])
    settings = {"chunk": method.chunk, "sinks": method.sinks, "normalize": method.plus}
    asked = repeat_prompts(WORDS, tokens, method.chunk)
    return [x[0] for x in learned.reconstruction(small.params, small.config, tokens, prompts=asked, **settings)]


@pytest.mark.parametrize("method", [ZIP, PLUS], ids=["kvzip", "kvzip+"])
def test_every_head_keeps_the_best_rows_of_the_reconstruction(method):
    cache, logits = prefill(method, PROMPTS)
    full, expected = prefill(ckv.Full(), PROMPTS)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    for i, text in enumerate(PROMPTS):
        for layer, whole, scores in zip(cache.layers, full.layers, repetition(method, text), strict=True):
            rows = [best(head, 12, 2, 1) for head in scores]
            assert held(layer, i) == rows
            at = np.sort([list(head) for head in rows])
            np.testing.assert_array_equal(
                layer.keys[i, :, :12], np.take_along_axis(np.asarray(whole.keys[i]), at[..., None], 1)
            )


def test_a_prompt_in_a_chat_template_is_repeated_in_it():
    """As KVzip's authors do: pieces begin behind the template, and its beginning of an answer stands before each."""
    config = dataclasses.replace(tiny().config, vocab_size=len(CHATTING))
    model = ckv.Model(random_params(config), config, CHATTING, None, "letters")
    chat, plain = (make_batch(model, ["abcdefghij" * 5], chat=chat).texts[0] for chat in (True, False))
    (prefix, suffix), words = frame_ids(CHATTING), learned.instruction(CHATTING)
    assert chat == [*prefix, *plain[1:], *suffix]
    method = ckv.completed(model, dataclasses.replace(ZIP, instruction=None))
    for text, own, size in ((chat, (*words[:2], suffix), len(prefix)), (plain, words, 0)):
        asked = repeat_prompts(own, jnp.asarray([text])[:, size:], ZIP.chunk)
        options = {"chunk": ZIP.chunk, "sinks": ZIP.sinks, "prefix": size}
        expected = learned.reconstruction(model.params, config, jnp.asarray([text]), prompts=asked, **options)
        cache, _ = prefill(method, [text], model, width=len(text))
        for layer, scores in zip(cache.layers, expected, strict=True):
            assert held(layer) == [best(head, 12, 2, 1) for head in scores[0]]
    with pytest.raises(ValueError, match=r"^Prompt 1 does not begin with the model's chat template, and others do"):
        prefill(method, [chat, plain], model, width=len(chat))
    longer = dataclasses.replace(method, frame=(tuple(range(len(plain) + 1)), suffix))
    cache, _ = prefill(longer, [plain], model, width=len(plain))  # no template fits into it
    assert held(cache.layers[0]) == held(prefill(method, [plain], model, width=len(plain))[0].layers[0])


def test_heads_of_a_layer_share_its_rows_without_a_safeguard():
    cache, _ = prefill(LAYER, PROMPTS)
    for i, text in enumerate(PROMPTS):
        for layer, scores in zip(cache.layers, repetition(LAYER, text), strict=True):
            flat = np.array(scores, np.float64)
            flat[:, :2] = flat[:, -1:] = np.inf
            chosen = np.argsort(-flat, axis=None, kind="stable")[: 2 * 12]
            assert held(layer, i) == [
                set((chosen[chosen // len(text) == head] % len(text)).tolist()) for head in (0, 1)
            ]


def test_heads_get_shares_of_the_budget():
    shares = ((1.5, 0.5), (1.0, 1.0))
    method = dataclasses.replace(ZIP, budget=ckv.Budget(tokens=12, shares=shares))
    cache, _ = prefill(method, PROMPTS[:1])
    scores = repetition(method, PROMPTS[0])
    assert sorted(int(group.length[0, 0]) for group in cache.layers[0].groups) == [6, 18]
    for group, (head,) in zip(cache.layers[0].groups, cache.layers[0].heads, strict=True):
        assert held(group) == [best(scores[0][head], (18, 6)[head], 2, 1)]


def rows_of(cache, row):
    """Keys, values and positions of a sequence that are held."""
    for layer in cache.layers:
        count = int(layer.length[row, 0])
        yield from (np.asarray(x[row, :, :count]) for x in (layer.keys, layer.values, layer.positions))


@pytest.mark.parametrize("padding", [0, VOCAB + 5], ids=["a token", "no token"])
def test_a_sequence_does_not_depend_on_padding_or_its_batch(padding):
    """An id that is none of the vocabulary embeds as NaN."""
    both, logits = prefill(PLUS, PROMPTS, width=48, padding=padding)
    for i, text in enumerate(PROMPTS):
        alone, expected = prefill(PLUS, [text], width=len(text))
        np.testing.assert_allclose(logits[i], expected[0], rtol=1e-4, atol=1e-5)
        for x, y in zip(rows_of(both, i), rows_of(alone, 0), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [ZIP, LAYER, ckv.Composed(ZIP, ckv.Full())], ids=["head", "layer", "composed"])
def test_it_generates_after_questions_and_is_compiled_ahead(method):
    options = {"method": method, "questions": [prompt(5, 4), prompt(6, 2), prompt(7, 3)], "max_new_tokens": 6}
    programs = []
    compile_ahead(tiny(), PROMPTS, **options, on_program=programs.append)
    assert {"read_layer", "feed", "repeat_layer", "whole", "compress_layer"} <= set(programs)
    result = ckv.generate(tiny(), PROMPTS, **options)
    assert np.mean(result.stats.kept_rows, axis=2).tolist() == [[12, 12, 12]] * 2
    for i, text in enumerate(PROMPTS):
        options["questions"] = [prompt(5 + i, (4, 2, 3)[i])]
        assert ckv.generate(tiny(), [text], **options).tokens == [result.tokens[i]]


def test_prompts_in_parts_and_progress():
    seen = []
    whole, _ = prefill(ZIP, PROMPTS)
    parts, _ = prefill(ZIP, PROMPTS, prefill_chunk=10, on_layer=lambda number, hidden: seen.append(number))
    assert seen == [0, 1]
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_tokenizer_gives_the_words():
    tokenizer = byte_tokenizer()
    encoder = type("Tokenizer", (), {"encode": lambda self, text, **options: tokenizer.encode(text).ids})()
    words = learned.instruction(encoder)
    assert tokenizer.decode(list(words[0])) == "\n\nRepeat the previous context exactly."
    first, later = repeat_prompts(words, np.arange(30)[None], 20)
    assert first.tolist() == [[*words[0], *words[2]]]
    assert later.tolist() == [[*words[1], *range(12, 20), *words[2]]]
    assert ZIP.with_words(words) == ZIP
    assert dataclasses.replace(ZIP, instruction=None).with_words(WORDS) == ZIP


def test_likelihoods_of_continuations():
    """An evaluation's other way into a model."""
    case = EncodedPrompt(tuple(PROMPTS[0]), (), tuple(prompt(8, 5)))
    (answer,) = likelihoods(tiny(), ZIP, [case])
    assert len(answer.logprobs) == 5
    assert answer.rows == 12


def test_bare_tensors_take_any_scores():
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 30, 8)), jnp.float32) for _ in range(2))
    scores = jnp.asarray(rng.normal(size=(2, 2, 30)), jnp.float32)
    cache = ckv.compress(ZIP, None, keys, values, scores=scores)
    for i in (0, 1):
        assert held(cache, i) == [best(head, 12, 2, 1) for head in scores[i]]


@pytest.mark.parametrize("method", [ZIP, LAYER, ckv.OrbitKV(BUDGET, sinks=2, recent=1, merged=0)])
def test_any_score_serves_any_keeper(method):
    """CriticalKV's greatest score is the greatest number there is, and behind a sequence all scores are -inf."""
    rng, lengths = np.random.default_rng(1), np.asarray([30, 21])
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 30, 8)), jnp.float32) for _ in range(2))
    output = jnp.asarray(rng.normal(size=(4, 8, 12)), jnp.float32)
    scores = learned.criticalkv(learned.keydiff(keys, lengths=lengths), values, output, 4, lengths=lengths)
    cache = ckv.compress(method, None, keys, values, lengths, scores=scores)
    assert int(cache.length.sum()) == 2 * 2 * 12
    for i, n in enumerate(lengths.tolist()):
        for head in (0, 1):
            assert set(np.argsort(-scores[i, head, :n])[:4].tolist()) <= held(cache, i)[head]


# --- KVzap ---

ZAP = ckv.KVzap(BUDGET, sinks=2, recent=3)


@functools.cache
def surrogates(layers=2):
    """The tiny model with a random surrogate."""
    model, rng = tiny(layers=layers), np.random.default_rng(5)

    def drawn():
        return {"weights": rng.normal(size=(32, 2)).astype(np.float32), "bias": rng.normal(size=2).astype(np.float32)}

    taught = tuple({**layer, "surrogate": jax.tree.map(jnp.asarray, drawn())} for layer in model.params["layers"])
    return dataclasses.replace(model, params={**model.params, "layers": taught})


def predicted(text, layer=0):
    """What a layer's surrogate says of each token, without any cache [K,N]."""
    model, tokens = surrogates(), jnp.asarray([text])
    hidden = decoder.embed(model.params, model.config, tokens, jnp.arange(len(text))[None])
    for weights in model.params["layers"][:layer]:
        q, k, v, _ = decoder.attention_in(weights, model.config, hidden, jnp.arange(len(text))[None])
        hidden = decoder.attention_out_and_mlp(weights, model.config, hidden, causal_attention(q, k, v))
    weights = model.params["layers"][layer]
    entering = decoder.attention_input(weights, model.config, hidden)
    return np.asarray(learned.surrogate(**weights["surrogate"], hidden=entering)[0])


@pytest.mark.parametrize("padding", [0, VOCAB + 5], ids=["a token", "no token"])
def test_rows_of_the_highest_predictions_stay(padding):
    both, _ = prefill(ZAP, PROMPTS, surrogates(), width=48, padding=padding)
    for i, text in enumerate(PROMPTS):
        alone, _ = prefill(ZAP, [text], surrogates(), width=len(text))
        for number, layer in enumerate(both.layers):
            assert held(layer, i) == [best(head, 12, 2, 3) for head in predicted(text, number)]
            assert held(layer, i) == held(alone.layers[number])


def test_heads_that_share_a_layer_are_safe_up_to_a_fifth():
    """AdaKV's rule."""
    cache, _ = prefill(dataclasses.replace(ZAP, scope="layer"), PROMPTS, surrogates())
    for layer in cache.layers:
        np.testing.assert_array_equal(layer.length.sum(axis=1), 24)
        assert int(layer.length.min()) >= 5


@pytest.mark.parametrize(("changes", "chunk"), [({}, 16), ({"qkv_bias": True}, None), ({"qk_norm": True}, 16)], ids=str)
def test_keys_and_scores_come_of_one_product_on_a_gpu(monkeypatch, changes, chunk):
    config = dataclasses.replace(surrogates().config, hidden_size=64, num_kv_heads=4, **changes)
    drawn = with_surrogate(dataclasses.replace(surrogates(), params=random_params(config), config=config)).params

    def narrow(layer):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer) | {"surrogate": layer["surrogate"]}

    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn) | {"layers": tuple(map(narrow, drawn["layers"]))}
    texts = padded(*PROMPTS, width=48, fill=0)

    def held_by(config):
        return ckv.prefill(params, config, ZAP, *texts, prefill_chunk=chunk)

    want, logits = held_by(config)
    take_gpu(monkeypatch, whole=False)
    monkeypatch.setattr(attention_in, "MANY", 1)
    taken = counted(monkeypatch, (attention_in, "keys_and_scores"))
    got, same = held_by(dataclasses.replace(config, eos_ids=(VOCAB - 1,)))  # another configuration is traced anew
    assert taken
    np.testing.assert_allclose(same, logits, rtol=2e-2, atol=2e-2)
    for a, b in zip(got.layers, want.layers, strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)
        np.testing.assert_allclose(a.keys.astype(jnp.float32), b.keys.astype(jnp.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [1, 3])
def test_scores_stay_with_their_rows_and_new_tokens_are_scored(width):
    """The first layer's scores are those of tokens alone, so that they are known of every row from scratch.

    No token comes twice in a text: the programs of prompts and steps round alike to a bit or two, and no further.
    """
    method = dataclasses.replace(ZAP, decode_interval=4)
    orders = [np.random.default_rng(seed).permutation(VOCAB).tolist() for seed in (1, 2)]
    model, texts, new = surrogates(), [orders[0][:37], orders[1][:21]], [orders[0][37:], orders[1][21:45]]
    cache, _ = prefill(method, texts, model, max_new_tokens=24, step_tokens=width)
    scores = [predicted([*text, *more]) for text, more in zip(texts, new, strict=True)]
    rows = [
        [sorted(best(head[: len(text)], 12, 2, 3)) for head in each] for text, each in zip(texts, scores, strict=True)
    ]
    for start in range(0, 24, width):
        tokens = jnp.asarray([more[start : start + width] for more in new])
        cache, _ = EXTEND(model.params, model.config, method, cache, tokens, jnp.asarray([width, width]))
        memory = np.asarray(cache.state[0][0]["scores"])
        for i, text in enumerate(texts):
            for head in (0, 1):
                mine = rows[i][head]
                mine.extend(range(len(text) + start, len(text) + start + width))
                if len(mine) >= 16:
                    mine[:] = [mine[j] for j in sorted(best(scores[i][head, mine], 12, 2, 3))]
                count = int(cache.layers[0].length[i, head])
                assert cache.layers[0].positions[i, head, :count].tolist() == mine
                off = np.linalg.norm(memory[i, head, :count] - scores[i][head, mine])
                assert off <= 1e-6 * np.linalg.norm(scores[i][head, mine])


# --- mistakes ---


@pytest.mark.wrong_arguments
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: prefill(ZAP, PROMPTS), "KVzap keeps rows by learned scores, and the model has none"),
        (
            lambda: prefill(dataclasses.replace(ZIP, instruction=None), PROMPTS),
            "KVzip has the model repeat its prompts and needs an instruction",
        ),
        (
            lambda: ckv.generate(tiny(), PROMPTS, method=dataclasses.replace(ZIP, instruction=None)),
            "needs an instruction for that: use generate with a model that has a tokenizer",
        ),
        (lambda: prefill(dataclasses.replace(ZIP, instruction=((VOCAB,), (), ())), PROMPTS), "holds id 61; .* 0 to 60"),
        (
            lambda: prefill(dataclasses.replace(ZIP, chunk=200), [prompt(1, 150)], width=150),
            "feeds up to 153 tokens after a prompt of 150, more than the model's 256 positions; a smaller chunk",
        ),
        (lambda: ckv.KVzip(BUDGET, chunk=0), "KVzip chunk must be a whole number of at least 1, got 0"),
        (lambda: ckv.KVzip(BUDGET, plus=1), "KVzip plus must be True or False, got 1"),
        (lambda: ckv.KVzip(BUDGET, instruction=(1, 2)), r"KVzip instruction must be None or 3 tuples of ids"),
        (lambda: ckv.KVzip(BUDGET, scope="all"), "KVzip scope must be"),
        (lambda: ckv.KVzap(BUDGET, scope="layer", decode_interval=4), "KVzap decode_interval must be None where heads"),
        (
            lambda: ckv.Composed(ckv.SnapKV(BUDGET, window=4), ckv.KVzap(BUDGET, decode_interval=4)),
            "Composed decode must be one that needs no scores of rows",
        ),
        (lambda: compressed(None), r"KVzip keeps the rows of the highest scores: scores must be \[B,K,N\], got None"),
        (lambda: compressed(jnp.zeros((1, 2, 29))), r"scores must have the shape \[1,2,30\], got \(1, 2, 29\)"),
        (lambda: compressed(jnp.zeros((1, 2, 30), jnp.int32)), "scores"),
        (lambda: compressed(jnp.full((1, 2, 30), jnp.nan)), "scores"),
        (
            lambda: compressed(jnp.full((1, 2, 30), -jnp.inf).at[:, :, :20].set(0).at[0, 1, 7].set(jnp.nan), [20]),
            r"scores must be finite numbers .* got nan at \[0, 1, 7\]",
        ),
        (
            lambda: compressed(jnp.zeros((1, 2, 30)).at[0, 1, 0].set(jnp.inf), [1]),
            r"scores must be finite numbers .* got inf at \[0, 1, 0\]",
        ),
    ],
)
def test_mistakes_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def compressed(scores, lengths=None):
    rows = jnp.ones((1, 2, 30, 8))
    return ckv.compress(ZIP, None, rows, rows, None if lengths is None else np.asarray(lengths), scores=scores)
