"""Both recipes in their tiny setting: they learn, survive a kill, export; and the shipped model answers."""

import dataclasses
import gzip
import importlib
import json
import sys
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.haystack import book
from clusterkv_jax.models.parameters import init

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "demo_model"


@pytest.fixture(scope="module")
def recipe_module():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("train_demo")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def demo_data(recipe_module):
    return importlib.import_module("demo_data")


@pytest.fixture(scope="module", params=["demo", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def recipe(recipe_module, request):
    return recipe_module.tiny(recipe_module.RECIPES[request.param])


@pytest.fixture(scope="module")
def corpus(recipe_module, tmp_path_factory) -> Path:
    """Books made up of the packaged words, prepared for the tiny recipes, which share a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    listed = synthetic.words("nouns", "train")
    texts = ["\n".join(" ".join(rng.choice(listed, 12)).capitalize() + "." for _ in range(300)) for _ in range(4)]
    with gzip.open(folder / "gutenberg_train.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    demo = recipe_module.tiny(recipe_module.RECIPES["demo"])
    return recipe_module.prepare(folder, tmp_path_factory.mktemp("work"), demo)


@pytest.fixture(scope="module")
def unbroken(recipe_module, recipe, corpus, tmp_path_factory):
    state, step = recipe_module.train(recipe, tmp_path_factory.mktemp("unbroken"), corpus)
    assert step == recipe.steps
    return state


def test_a_killed_run_ends_like_an_unbroken_one(recipe_module, recipe, corpus, unbroken, tmp_path):
    class Killed(Exception):
        pass

    def kill(step: int) -> None:
        if step == 14:  # after the checkpoint of step 10, before the next
            raise Killed

    with pytest.raises(Killed):
        recipe_module.train(recipe, tmp_path, corpus, after_step=kill)
    steps: list[int] = []
    state, _ = recipe_module.train(recipe, tmp_path, corpus, after_step=steps.append)
    assert steps[0] == 11
    jax.tree.map(np.testing.assert_array_equal, state["params"], unbroken["params"])


def test_training_lowers_the_loss(recipe_module, recipe, demo_data, corpus, unbroken):
    prepared = demo_data.load_corpus(corpus)
    tokens, weights = demo_data.make_batch(prepared, demo_data.counter(prepared.tokenizer), 385, 4, seed=99, step=0)

    @jax.jit
    def loss(params):
        return recipe_module.loss_and_accuracy(params, recipe.config, tokens, weights, np.float32)[0]

    assert loss(unbroken["params"]) < loss(recipe_module.new_state(recipe)["params"]) - 0.3


def test_stops_when_its_time_is_over_and_refuses_another_recipes_folder(recipe_module, corpus, tmp_path):
    recipe = recipe_module.tiny(recipe_module.RECIPES["demo"])
    _, step = recipe_module.train(recipe, tmp_path, corpus, seconds=0.0)
    assert step == 1
    other = dataclasses.replace(recipe, seed=1)
    with pytest.raises(ValueError, match=r"recipe.json describes another recipe"):
        recipe_module.train(other, tmp_path, corpus)


def test_worker_processes_make_the_same_batches(demo_data, corpus):
    shapes = [(2, 385), (1, 769)]
    alone, spawned = (list(demo_data.batches(corpus, shapes, 0, 0, workers)) for workers in (0, 2))
    for one, other in zip(alone, spawned, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_rows_weigh_answers_most_and_padding_nothing(demo_data, corpus):
    prepared = demo_data.load_corpus(corpus)
    count = demo_data.counter(prepared.tokenizer)
    rows = [demo_data.make_row(prepared, count, 1024, (0, 0, row)) for row in range(30)]
    tokens, weights = (np.stack(parts) for parts in zip(*rows, strict=True))
    end, pad = (prepared.tokenizer.token_to_id(name) for name in (demo_data.END, demo_data.PAD))
    assert set(np.unique(weights)) == {0, 1, demo_data.ANSWER_WEIGHT}
    assert (tokens == end).sum() > 10
    assert (weights[tokens == end] == demo_data.ANSWER_WEIGHT).mean() > 0.9  # copying may draw the token too
    assert (weights[tokens == pad] == 0).mean() > 0.9


def test_export_is_a_model_that_loads(recipe_module, recipe, corpus, unbroken, tmp_path):
    recipe_module.export(unbroken, recipe, corpus, tmp_path / "model")
    model = ckv.load(tmp_path / "model")
    assert model.config.max_positions == 768
    assert model.config.eos_ids == (1,)
    np.testing.assert_allclose(
        np.asarray(model.params["embed"]), np.asarray(unbroken["params"]["embed"]), rtol=2**-8, atol=1e-6
    )
    assert (model.config.family, model.config.qk_norm) == (recipe.family, recipe.family == "qwen3")
    assert len(ckv.generate(model, ["Call me Ishmael."], max_new_tokens=4).tokens[0]) <= 4


def test_recipes_are_what_the_pages_say(recipe_module):
    """The demo's is the one that the packaged model was trained by; the second has 60 M parameters and 8k positions."""
    demo, second = (recipe_module.RECIPES[name] for name in ("demo", "qwen3"))
    assert dataclasses.replace(demo.config, dtype="bfloat16") == ckv.load("demo").config
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), second.config))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 60_833_280
    assert second.config.max_positions == 8192


def test_an_unknown_recipe_is_refused(recipe_module):
    result = CliRunner().invoke(recipe_module.app, ["--recipe", "qwen4"])
    assert result.exit_code == 2
    assert "'qwen4' is no recipe; allowed: demo, qwen3" in result.stderr


def test_missing_data_is_named(recipe_module, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no gutenberg_train.jsonl.gz in .*: name the data folder with --data"):
        recipe_module.prepare(tmp_path, tmp_path / "work", recipe_module.RECIPES["demo"])


# --- the shipped model ---


def demo_folder() -> Path:
    return Path(str(resources.files("clusterkv_jax.models"))) / "demo"


def test_the_shipped_folder_is_small_and_complete():
    names = {path.name for path in demo_folder().iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in demo_folder().iterdir()) <= 20 * 2**20


def test_the_shipped_tokenizer_begins_texts_and_splits_digits_in_threes():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    assert tokenizer("Call me Ishmael.").input_ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.tokenize("4821057") == ["482", "105", "7"]
    assert tokenizer.decode(tokenizer("Élan 4821057 – ok", add_special_tokens=False).input_ids) == "Élan 4821057 – ok"


def test_the_shipped_model_answers_with_and_without_the_answers_beginning():
    model = ckv.load("demo")

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False))

    rng = np.random.default_rng(0)
    listed = synthetic.words("nouns", "valid")
    text = "\n".join(" ".join(rng.choice(listed, 12)).capitalize() + "." for _ in range(300))
    source = book(text, lambda texts: [count(one) for one in texts])
    spec = synthetic.Needles("book", keys=4)
    examples = synthetic.niah(rng, 900, count, spec, source, questions=4, split="valid")
    context = examples[0].context
    questions = [example.question + example.answer_prefix for example in examples] + [examples[0].question]
    replies = [example.reply for example in examples] + [examples[0].answer_prefix + examples[0].reply]
    result = ckv.generate(model, [context] * 5, method=ckv.Full(), questions=questions, max_new_tokens=32)
    assert result.texts == replies
