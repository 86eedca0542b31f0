"""Training through a compressed cache: gradients are those of the model, runs resume, wrong files are one sentence."""

import gzip
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax.models.decoder import forward
from tests.support.scripts import script
from tests.support.tiny import prompt, sliding, tiny

pytest.importorskip("optax", reason="training: pip install 'clusterkv-jax[train]'")
pytest.importorskip("orbax.checkpoint", reason="training: pip install 'clusterkv-jax[train]'")

from clusterkv_jax.training import examples, loop, tuning
from clusterkv_jax.training.cartridge import divergence, logits_after, rows_of, with_rows
from clusterkv_jax.training.objective import TrainingBatch, answer_loss, in_place_of, logprobs, read
from clusterkv_jax.training.trainees import of_model

MERGING = ckv.GravityKV(ckv.Budget(ratio=0.5), sinks=2, recent=4)
CONTEXTS = np.asarray([prompt(1, 32), prompt(2, 32)], np.int32)
FOLLOW = np.asarray([prompt(3, 6), prompt(4, 6)], np.int32)
BATCH = TrainingBatch(
    CONTEXTS,
    np.asarray([32, 27], np.int32),
    FOLLOW,
    np.asarray([6, 5], np.int32),
    np.asarray([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool),
)


MODELS = {"tiny": tiny, "windows and caps": partial(sliding, layers=2, soft_cap=3.0)}


def through_a_cache(params, config, method=None, through_rows=True):
    return answer_loss(params, config, method or ckv.Full(), BATCH, through_rows=through_rows)[0]


def without_a_cache(params, config):
    """The loss of the same tokens under full attention, one text after the other."""
    total = jnp.float32(0)
    for row in range(2):
        length, learned = int(BATCH.lengths[row]), np.flatnonzero(BATCH.learned[row])
        text = jnp.asarray([[*CONTEXTS[row, :length], *FOLLOW[row]]])
        logits = forward(params, config, text)[:, length - 1 : -1]
        total -= jnp.sum(logprobs(logits, jnp.asarray(FOLLOW[row : row + 1]))[0, learned])
    return total / int(BATCH.learned.sum())


def apart(one, other):
    """Relative distance of two pytrees."""
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (one, other)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_a_full_cache_are_those_without_a_cache(name):
    params, config = MODELS[name]().params, MODELS[name]().config
    expected, reference = jax.jit(jax.value_and_grad(without_a_cache), static_argnums=1)(params, config)
    loss, grads = jax.jit(jax.value_and_grad(through_a_cache), static_argnums=1)(params, config)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert apart(grads, reference) < 1e-5

    def of_answers(params):
        return through_a_cache(params, config, through_rows=False)

    if name == "tiny":
        loss, grads = jax.jit(jax.value_and_grad(of_answers))(params)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert apart(grads, reference) > 0.1


def test_a_gradient_of_rows_is_that_of_small_changes():
    """Of compressed rows, their degrees among them; a gradient that is zero fails."""
    model = tiny()
    cache, _ = ckv.prefill(
        model.params, model.config, MERGING, CONTEXTS[:1], np.asarray([32]), reserve=6, step_tokens=6
    )
    tokens, places = jnp.asarray(FOLLOW), jnp.asarray([[1, 2, 3], [0, 2, 4]])
    teacher = jax.random.normal(jax.random.key(0), (2, 3, model.config.vocab_size))

    @jax.jit
    def loss(rows):
        student = logits_after(model.params, model.config, MERGING, with_rows(cache, rows), tokens, places)
        return divergence(teacher, student, jnp.ones((2, 3), bool))

    rows = rows_of(cache)
    grads = jax.jit(jax.grad(loss))(rows)
    leaves, tree = jax.tree.flatten(rows)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    change = jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    for name in ("keys", "values", "log_degree"):
        only = [[{n: x if n == name else 0 * x for n, x in group.items()} for group in layer] for layer in change]
        only = jax.tree.unflatten(tree, jax.tree.leaves(only))

        def step(size):
            return jax.tree.map(lambda x, d: x + size * d, rows, only)  # noqa: B023

        slope = (loss(step(1e-2)) - loss(step(-1e-2))) / 2e-2
        along = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(only), strict=True))
        assert abs(slope) > 1e-3, name
        np.testing.assert_allclose(along, slope, rtol=0.05, err_msg=name)


def test_reading_for_a_gradient_changes_no_number_of_a_cache():
    params, config = tiny(layers=1).params, tiny(layers=1).config
    plain, _ = jax.jit(lambda params: read(params, config, MERGING, BATCH, through_rows=False))(params)
    again, _ = jax.jit(lambda params: read(params, config, MERGING, BATCH, through_rows=True))(params)
    jax.tree.map(np.testing.assert_array_equal, plain, again)


def test_a_rows_gradient_goes_to_the_token_in_whose_place_it_stands():
    keys = jnp.arange(12.0).reshape(1, 1, 6, 2)
    rows = jnp.ones((1, 1, 3, 2))
    layer = ckv.LayerCache(rows, rows, jnp.ones((1, 1, 3)), jnp.asarray([[3]]), jnp.asarray([[[0, 2, 5]]]))
    weights = jnp.asarray([[[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]])
    kept, grads = jax.value_and_grad(
        lambda keys: jnp.sum(in_place_of(layer, keys, keys, jnp.asarray([6])).keys * weights)
    )(keys)
    assert kept == weights.sum()
    np.testing.assert_array_equal(grads[0, 0], [[1, 2], [0, 0], [3, 4], [0, 0], [0, 0], [5, 6]])


def test_rows_without_a_gradient_are_refused():
    stored = ckv.SnapKV(ckv.Budget(ratio=0.5), window=8, cache_dtype="int8")
    with pytest.raises(ValueError, match="Rows of a cache_dtype are codes, which have no gradient"):
        jax.eval_shape(lambda params: through_a_cache(params, tiny().config, stored), tiny().params)
    recall = ckv.ClusterKV(ckv.Budget(tokens=8), store="host")
    with pytest.raises(ValueError, match="ClusterKV holds rows in the host's memory"):
        jax.eval_shape(lambda params: through_a_cache(params, tiny().config, recall), tiny().params)


# --- runs ---


@pytest.fixture
def data(tmp_path):
    """Five examples of token ids, of unequal lengths."""
    lines = [{"context": prompt(i, 20 + 2 * i), "question": prompt(9, 2), "answer": prompt(i, 3)} for i in range(5)]
    file = tmp_path / "data.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    return examples.read_examples(file, tiny(), context_tokens=16, answer_tokens=4)


def tuned(data, work, **options):
    """A run of six steps, of which each second one is saved."""
    about = {"model": "tiny", "method": "merging", "gradient": "rows", "data": "data", "dtype": "float32"}
    numbers = {"steps": 6, "rows": 2, "learning_rate": 1e-2, "warmup": 1, "weight_decay": 0.1, "seed": 0}
    setting = tuning.Tuning(**about, **numbers)
    sizes = examples.sizes_of(data, tiny())
    return tuning.tune(
        setting,
        of_model(tiny(layers=1)),
        ckv.StreamingLLM(ckv.Budget(tokens=12)),
        data,
        sizes,
        work,
        save_every=2,
        **options,
    )


class Killed(Exception):
    pass


def test_a_run_lowers_the_loss_and_a_killed_or_ended_one_comes_to_the_same_weights(data, tmp_path):
    losses = []

    def note(number, batch, metrics):
        return losses.append(float(metrics[0]))

    whole, steps = tuned(data, tmp_path / "whole", report=note)
    assert steps == 6
    assert np.mean(losses[3:]) < losses[0] - 0.1

    last = int(np.random.default_rng(len(str(tmp_path))).integers(1, 6))

    def kill(number):
        if number == last:
            raise Killed

    with pytest.raises(Killed):
        tuned(data, tmp_path / "killed", after_step=kill)
    resumed, _ = tuned(data, tmp_path / "killed")
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)

    _, steps = tuned(data, tmp_path / "ended", asked=lambda: True)
    assert steps == 1
    resumed, _ = tuned(data, tmp_path / "ended")
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_a_folder_of_another_run_is_refused(tmp_path):
    loop.claim(tmp_path / "run.json", "one")
    loop.claim(tmp_path / "run.json", "another")  # no checkpoint is lost
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run\.json describes another run than this run's: choose another --work"):
        loop.claim(tmp_path / "run.json", "a third")


def test_other_examples_are_another_run(data, tmp_path):
    """Cut differently, or changed where they lie, they come from a file of the same name."""
    tuned(data, tmp_path)
    with pytest.raises(ValueError, match=r"run\.json describes another run than this run's"):
        tuned(data[:-1], tmp_path)


def test_a_context_that_cannot_be_compressed_is_named_before_the_first_step(data):
    wide = ckv.GravityKV(ckv.Budget(ratio=0.5))
    with pytest.raises(
        ValueError, match="a prompt of 20 tokens has a budget of 10 rows, which must be more than sinks"
    ):
        tuning.check_contexts(of_model(tiny()), wide, data, examples.sizes_of(data, tiny()))


# --- examples ---


def test_examples_learn_answers_and_the_end_alone(tmp_path):
    model = tiny(eos=(60,))
    file = tmp_path / "a.jsonl"
    file.write_text('{"context": [1, 2, 3], "question": [4], "answer": [5, 6]}\n\n{"context": [7], "answer": [8]}\n')
    found = examples.read_examples(file, model, context_tokens=16, answer_tokens=4)
    assert found == [examples.TrainingExample((1, 2, 3), (4, 5, 6, 60), 3), examples.TrainingExample((7,), (8, 60), 2)]
    batch = examples.batch_of(found, examples.Sizes(4, 5))
    np.testing.assert_array_equal(batch.follow, [[4, 5, 6, 60, 0], [8, 60, 0, 0, 0]])
    np.testing.assert_array_equal(batch.learned, [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


def test_each_epoch_sees_every_example_once_and_a_later_start_the_same_batches(data):
    sizes = examples.sizes_of(data, tiny())
    stream = examples.batches(data, sizes, 2, 0, 0)
    first = [next(stream) for _ in range(5)]
    seen = sorted(tuple(row) for batch in first for row in batch.follow)
    assert seen == sorted([*(tuple(row) for row in examples.batch_of(data, sizes).follow)] * 2)
    later = next(examples.batches(data, sizes, 2, 0, 4))
    jax.tree.map(np.testing.assert_array_equal, later, first[4])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"context": [1]}', "Line 1 of .*: Object missing required field answer"),
        ('{"context": [1], "answer": [2], "reply": 3}', "Line 1 of .*: Object contains unknown field reply"),
        ('{"context": [1], "answer": [2]', "Line 1 of .* is not valid JSON"),
        ('{"context": [1], "answer": []}', "Line 1 of .*, field 'answer' is empty"),
        ('{"context": "a text", "answer": [1]}', "field 'context' is text, and model 'tiny' has no tokenizer"),
        ('{"context": [1, 61], "answer": [1]}', "field 'context' holds token id 61; allowed are 0 to 60"),
        (json.dumps({"context": [1] * 256, "answer": [1]}), "Line 1 of .* has 257 tokens, more than the model's 256"),
        ("", "holds no example"),
    ],
)
def test_a_wrong_file_is_one_sentence(line, sentence, tmp_path):
    file = tmp_path / "wrong.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=sentence) as error:
        examples.read_examples(file, tiny(), context_tokens=16, answer_tokens=4)
    assert "\n" not in str(error.value)


def test_plain_text_is_cut_into_contexts_and_what_follows(tmp_path):
    model = ckv.load("demo")
    file = tmp_path / "book.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 8)
    found = examples.read_examples(file, model, context_tokens=32, answer_tokens=8)
    assert {(len(e.context), len(e.follow), e.learned, e.context[0]) for e in found} == {(32, 8, 8, 0)}
    ids = model.tokenizer.encode(file.read_text(), add_special_tokens=False)
    assert [*found[0].context[1:], *found[0].follow, *found[1].context[1:]] == ids[: 31 + 8 + 31]
    with pytest.raises(ValueError, match=r"holds no example of 1024 \+ 64 tokens"):
        examples.read_examples(file, model, context_tokens=1024, answer_tokens=64)


def test_the_script_refuses_a_budget_that_is_not_taken():
    method_of = script("train.py").method_of
    assert method_of("snapkv", "0.5", None).budget == ckv.Budget(ratio=0.5)
    assert method_of("full", None, None) == ckv.Full()
    with pytest.raises(ValueError, match="Full keeps everything and takes no budget"):
        method_of("full", "0.125", None)


def test_the_script_warms_up_in_fewer_steps_than_there_are(monkeypatch, data, tmp_path):
    """Nobody who takes few steps need say so."""
    program, settings = script("train.py"), []
    monkeypatch.setattr(program, "read_examples", lambda *_, **__: data)
    monkeypatch.setattr(program, "tune", lambda setting, *_, **__: settings.append(setting) or (None, 0))
    monkeypatch.setattr(program, "open_trainee", lambda *_: (of_model(tiny(layers=1)), None))
    for options in (["--steps", "1"], ["--steps", "3"], [], ["--warmup", "4"]):
        CliRunner().invoke(program.app, ["--data", "any", "--work", str(tmp_path), *options])
    assert [setting.warmup for setting in settings] == [0, 2, 10, 4]
    result = CliRunner().invoke(program.app, ["--data", "any", "--steps", "3", "--warmup", "3"])
    assert result.exit_code == 2
