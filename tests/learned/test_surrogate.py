"""A calibration with a surrogate: what is fitted, the file, and what a model and its methods make of it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import clusterkv_jax as ckv
from clusterkv_jax import calibration, observation
from clusterkv_jax.calibration import PARTS, Calibration
from clusterkv_jax.checkpoints.loading import calibrated
from clusterkv_jax.learned.mlp import fit_mlp
from clusterkv_jax.learned.ridge import fit_ridge, products
from clusterkv_jax.learned.surrogates import predicted_scores
from tests.support.byte_model import byte_tokenizer
from tests.support.tiny import prompt, random_params, taught, tiny

DEMO = Path(__file__).parents[2] / "models" / "demo" / "calibration.safetensors"


def rows(seed, count=400, inputs=12, heads=2, noise=0.3):
    """Hidden states, and scores that they explain but for noise."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, inputs)).astype(np.float32)
    scores = hidden @ rng.normal(size=(inputs, heads)) + 5 + noise * rng.normal(size=(count, heads))
    return hidden, scores.astype(np.float32)


def test_ridge_is_least_squares_and_says_what_it_explains():
    hidden, scores = rows(1)
    sums = np.asarray(products(hidden[:150], scores[:150].T), np.float64) + np.asarray(
        products(hidden[150:], scores[150:].T), np.float64
    )
    fit = fit_ridge(sums, 2)
    ones = np.concatenate([hidden, np.ones((400, 1))], axis=1)
    expected = np.linalg.lstsq(ones, scores, rcond=None)[0]
    np.testing.assert_allclose(fit.arrays["weights"], expected[:-1], atol=0.01)
    np.testing.assert_allclose(fit.arrays["bias"], expected[-1], atol=0.01)
    rest = scores - ones @ expected
    np.testing.assert_allclose(fit.variance, rest.var(axis=0), rtol=0.01)
    np.testing.assert_allclose(fit.explained, 1 - rest.var(axis=0) / scores.var(axis=0), atol=1e-3)
    mean = np.mean(np.exp(scores[:, 0] - fit.expected(hidden)[0]))
    assert mean == pytest.approx(1, abs=0.1)  # what is expected of a row is no logarithm's mean


def test_a_network_fits_what_a_line_cannot():
    hidden, _ = rows(2, count=20000, inputs=64)
    scores = np.abs(hidden[:, :2]).astype(np.float32) * 2
    line = fit_ridge(np.asarray(products(hidden, scores.T), np.float64), 2)
    curve = fit_mlp(hidden, scores)
    assert line.explained.max() < 0.1
    assert curve.explained.min() > 0.5
    predicted = predicted_scores(jax.tree.map(jnp.asarray, curve.arrays), jnp.asarray(hidden[None, -1000:]))[0].T
    rest = ((np.asarray(predicted) - scores[-1000:]) ** 2).mean(axis=0)  # the rows that were held out
    np.testing.assert_allclose(rest, curve.variance, rtol=0.05)


def test_too_little_text_is_one_sentence():
    with pytest.raises(ValueError, match="surrogate of 12 inputs needs more than 12 rows of text, got 12"):
        fit_ridge(np.asarray(products(*(x[:12] if i == 0 else x[:12].T for i, x in enumerate(rows(1)))), np.float64), 2)
    model = dataclasses.replace(tiny(), tokenizer=object())
    with pytest.raises(ValueError, match="surrogate of 32 inputs needs more than 32 rows of text, got 16"):
        observation.calibrate(model, [list(range(20))])


@pytest.fixture(scope="module")
def measured():
    """The demo model's calibration, which is packaged with it."""
    return calibration.read(DEMO)


def test_the_file_holds_everything(measured, tmp_path):
    file = tmp_path / "demo.safetensors"
    calibration.write(file, measured)
    again = calibration.read(file)
    assert again == measured
    for one, other in zip(again.surrogate, measured.surrogate, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    first = file.read_bytes()
    calibration.write(file, again)
    assert file.read_bytes() == first
    with pytest.raises(ValueError, match="has no surrogate to write"):
        calibration.write(file, dataclasses.replace(measured, surrogate=None))


def rewritten(file, change):
    """The same file with other arrays or metadata."""
    with safe_open(file, framework="np") as opened:
        arrays, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change(arrays, metadata)
    save_file(arrays, file, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda arrays, _: arrays["3.weights"].__iadd__(1), "is damaged: '3.weights' has not the numbers"),
        (lambda arrays, _: arrays.pop("3.weights"), "is damaged: it lacks '3.weights'"),
        (lambda arrays, _: arrays.update(more=np.ones(3, np.float32)), "is damaged: 'more' has not the numbers"),
        (lambda _, metadata: metadata.pop("calibration"), "is no calibration: its metadata lack 'calibration'"),
        (lambda _, metadata: metadata.update(calibration="{"), "is not valid JSON"),
        (lambda _, metadata: metadata.update(calibration="{}"), "missing required field numbers"),
        (
            lambda _, metadata: metadata.update(calibration=metadata["calibration"].replace("explained", "explain")),
            "Unknown key 'explain'",
        ),
    ],
)
def test_a_damaged_file_is_one_sentence(measured, tmp_path, change, sentence):
    file = tmp_path / "demo.safetensors"
    calibration.write(file, measured)
    rewritten(file, change)
    with pytest.raises(ValueError, match=sentence):
        calibration.read(file)


def test_a_file_that_was_cut_is_one_sentence(measured, tmp_path):
    file = tmp_path / "demo.safetensors"
    calibration.write(file, measured)
    whole = file.read_bytes()
    for length in range(0, len(whole), len(whole) // 20):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            calibration.read(file)


def test_a_model_takes_it_with_its_parameters(measured, tmp_path):
    file = tmp_path / "demo.safetensors"
    calibration.write(file, measured)
    model = ckv.load("demo", calibration=file)
    assert model.calibration == measured
    for layer, arrays in zip(model.params["layers"], measured.surrogate, strict=True):
        np.testing.assert_array_equal(layer["surrogate"]["weights"], arrays["weights"])
    with pytest.raises(ValueError, match="6 layers of 2 KV heads; this model has 2 of 2"):
        calibrated(tiny(), measured)
    narrow = dataclasses.replace(
        measured, surrogate=tuple({**x, "weights": x["weights"][:99]} for x in measured.surrogate)
    )
    with pytest.raises(ValueError, match="surrogate is of demo, which is 99 wide; this model is 256"):
        calibrated(model, narrow)


@pytest.mark.parametrize(
    "method",
    [
        ckv.Composed(ckv.KVzap(ckv.Budget(ratio=0.25), sinks=1, recent=1), ckv.Full()),
        ckv.Composed(ckv.OrbitKV(ckv.Budget(ratio=0.25), sinks=1, recent=1), ckv.H2O(ckv.Budget(ratio=0.5))),
        ckv.Matched(ckv.OrbitKV(ckv.Budget(ratio=0.25), sinks=1, recent=1), queries=64),
    ],
    ids=["full", "h2o", "matched"],
)
def test_methods_of_methods_get_the_shares_too(method):
    least = tuple(tuple(tuple((shift - np.log(PARTS)).tolist()) for shift in (0.0, -3.0)) for _ in range(2))
    model = dataclasses.replace(taught(), calibration=scored(least))
    result = ckv.generate(model, [prompt(1, 200)], method=method, max_new_tokens=2)
    rows = [heads for layer in result.stats.kept_rows for heads in layer[0]]
    assert max(rows) > 8 * min(rows)
    assert sum(rows) <= 0.25 * 4 * result.stats.prompt_tokens[0]


def test_a_budget_of_tokens_needs_the_length_of_the_texts():
    logs = tuple((tuple((-np.log(PARTS)).tolist()),) for _ in range(2))
    with pytest.raises(ValueError, match="of mine does not say of how many tokens its texts are, got None"):
        dataclasses.replace(scored(logs), settings={}).applied(ckv.SnapKV(ckv.Budget(tokens=100)))


def scored(least):
    shape = np.shape(least)[:2]
    ones = tuple((1.0,) * shape[1] for _ in range(shape[0]))
    zeros = tuple((0.0,) * shape[1] for _ in range(shape[0]))
    return Calibration("mine", zeros, (), ones, {"tokens": 1000}, least)


def test_heads_get_the_rows_that_are_among_the_best():
    """Scores of a power law: a head whose scores are e^2 higher has the rows of a lower threshold."""
    logs = np.log(PARTS)
    least = tuple(tuple(tuple((shift - logs).tolist()) for shift in layer) for layer in ((0.0, 1.0), (2.0, 0.0)))
    shares = np.asarray(scored(least).kept_shares(0.1))
    expected = np.exp([[0, 1], [2, 0]])
    expected /= expected.mean()
    assert (np.abs(np.log2(shares / expected)) <= 0.13).all()  # steps of a quarter of a doubling
    assert shares[0, 0] == shares[1, 1]
    # With more to keep, the best head keeps everything, and the mean is kept.
    shares = np.asarray(scored(least).kept_shares(0.5))
    assert shares[1, 0] == 2
    assert shares.mean() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"has shares of 0.39% to 100%, not of 0.10%"):
        scored(least).kept_shares(0.001)


def test_heads_below_the_mean_share_merge_everything():
    model = taught()
    shares = ((1.5, 0.5), (1.5, 0.5))
    method = ckv.OrbitKV(ckv.Budget(ratio=0.5, shares=shares), sinks=2, recent=4, merged=0.2)
    ids, lengths = np.arange(80)[None] % 50, np.asarray([80])
    cache, _ = ckv.prefill(model.params, model.config, method, ids, lengths, max_new_tokens=4)
    for layer in cache.layers:
        degrees = [np.asarray(group.degree)[0, 0, : int(group.length[0, 0])] for group in layer.groups]
        assert [len(x) for x in degrees] == [60, 20]
        assert all(
            np.sum(x > 1) <= merged for x, merged in zip(degrees, (10, 14), strict=True)
        )  # a fifth of 54; all of 14
        assert np.sum(degrees[0][2:-4] == 1) >= 44


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    pieces, file, seen = [prompt(1, 200), prompt(2, 200)], tmp_path / "started", []
    config = dataclasses.replace(tiny().config, vocab_size=257, max_positions=1024)
    words = SimpleNamespace(encode=lambda text, **options: byte_tokenizer().encode(text).ids)
    model = ckv.Model(random_params(config), config, tokenizer=words, mesh=None, name="bytes")
    monkeypatch.setattr(observation, "SAVE_SECONDS", -1.0)
    whole = observation.calibrate(model, pieces)

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observation.calibrate(model, pieces, resume=file, progress=stop)
    assert file.is_file()
    again = observation.calibrate(model, pieces, resume=file, progress=lambda *now: seen.append(now))
    assert min(done for done, _ in seen) == seen[0][1] // 2  # parts of the second piece's repetition are told, too
    assert again == whole
    assert not file.exists()
    file.write_bytes(b"no such file")
    assert observation.calibrate(model, pieces, resume=file) == whole
    # What another call left is not taken.
    with pytest.raises(KeyboardInterrupt):
        observation.calibrate(model, pieces, resume=file, progress=stop)
    seen.clear()
    observation.calibrate(model, pieces[::-1], resume=file, progress=lambda *now: seen.append(now))
    assert seen[0][0] <= 2
