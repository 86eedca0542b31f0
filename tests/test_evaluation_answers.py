"""How suites are answered, and the command that asks for it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import calibration, cli
from clusterkv_jax.cli.options import check_taken, parse_entries
from clusterkv_jax.cli.results_folder import results_folder
from clusterkv_jax.evaluation import responses
from clusterkv_jax.evaluation.tasks.cases import EncodedPrompt
from clusterkv_jax.models import decoder
from tests.support.job import small_model
from tests.support.tiny import STEP, prompt, tiny


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model of one layer with the demo model's tokenizer."""
    return small_model(tmp_path_factory.mktemp("small") / "model")


def reference(pairs):
    """Log-likelihoods of all tokens after each place of whole texts, by one forward pass without any cache."""
    model = tiny()
    rows = np.zeros((len(pairs), 104), np.int32)
    for row, pair in zip(rows, pairs, strict=True):
        row[: len(pair.context) + len(pair.continuation)] = [*pair.context, *pair.continuation]

    @jax.jit
    def scores(rows):
        hidden = decoder.forward_hidden(model.params, model.config, rows)
        return jax.nn.log_softmax(decoder.unembed(model.params, model.config, hidden), axis=-1)

    return np.asarray(scores(rows))


def test_likelihoods_are_those_of_the_whole_text():
    pairs = [EncodedPrompt(tuple(prompt(i, 84 + 3 * i)), (), tuple(prompt(90 + i, 5 + i))) for i in range(3)]
    likeliest = reference(pairs)[0, len(pairs[0].context) - 1].argmax()
    pairs.append(EncodedPrompt(pairs[0].context, (), (int(likeliest),)))
    answers = responses.likelihoods(tiny(), ckv.Full(), pairs)
    assert [answer.greedy for answer in answers] == [False, False, False, True]
    for pair, answer, scores in zip(pairs, answers, reference(pairs), strict=True):
        places = len(pair.context) - 1 + np.arange(len(pair.continuation))
        np.testing.assert_allclose(answer.logprobs, scores[places, np.asarray(pair.continuation)], rtol=1e-5)
        assert answer.rows == len(pair.context)


def test_a_compressed_context_is_read_differently_and_counted():
    method = ckv.CentroidKV(ckv.Budget(tokens=40), sinks=4, recent=8, chunk=16, interval=8)
    pair = EncodedPrompt(tuple(prompt(3, 90)), (), tuple(prompt(4, 6)))
    (answer,) = responses.likelihoods(tiny(), method, [pair])
    assert answer.rows == 40
    assert np.isfinite(answer.logprobs).all()
    places = 89 + np.arange(6)
    first = responses.likelihoods(tiny(), method, [EncodedPrompt(pair.context, (), pair.continuation[:1])])[0]
    assert first.logprobs == pytest.approx(answer.logprobs[:1], abs=1e-4)
    full = reference([pair])[0][places, np.asarray(pair.continuation)]
    assert not np.allclose(answer.logprobs, full, rtol=1e-3)
    assert responses.possible(tiny(), method, pair, 8)
    assert not responses.possible(tiny(), ckv.CentroidKV(ckv.Budget(ratio=0.25)), pair, 8)


def test_a_continuation_is_read_as_decoding_would():
    """It brings sequences back to their budget on the way, each when it is due."""
    method = ckv.CentroidKV(ckv.Budget(tokens=40), sinks=4, recent=8, chunk=16, interval=8)
    pairs = [EncodedPrompt(tuple(prompt(i, 90 - 5 * i)), (), tuple(prompt(9 + i, 20 - 7 * i))) for i in (0, 1)]
    for pair, answer in zip(pairs, responses.likelihoods(tiny(), method, pairs), strict=True):
        *context, token = pair.context
        cache, _ = ckv.prefill(tiny().params, tiny().config, method, np.asarray([context]), np.asarray([len(context)]))
        for following, score in zip(pair.continuation, answer.logprobs, strict=True):
            cache, logits = STEP(tiny().params, tiny().config, method, cache, jnp.asarray([token]))
            assert score == pytest.approx(float(jax.nn.log_softmax(logits)[0, following]), abs=1e-4)
            token = following


@pytest.mark.parametrize("method", [ckv.StreamingLLM(ckv.Budget(tokens=24)), ckv.Full(cache_dtype="int4")])
def test_an_answer_of_one_token_sees_the_compression(method):
    """The last token of a context is read from the compressed cache of the others; one token alone is as it is."""
    model, context, answer = tiny(), tuple(prompt(3, 90)), (7,)
    pairs = [EncodedPrompt(context, (), answer), EncodedPrompt(context[:1], (), answer)]
    one, alone = (responses.likelihoods(model, method, [pair])[0].logprobs[0] for pair in pairs)
    both = [scored.logprobs[0] for scored in responses.likelihoods(model, method, pairs)]
    options = {"max_new_tokens": 16, "reserve": 17}
    cache, _ = ckv.prefill(model.params, model.config, method, np.asarray([context[:-1]]), np.asarray([89]), **options)
    _, logits = STEP(model.params, model.config, method, cache, jnp.asarray(context[-1:]))
    assert one == pytest.approx(float(jax.nn.log_softmax(logits)[0, 7]), abs=1e-4)
    assert both == pytest.approx([one, alone], abs=1e-4)
    whole = reference(pairs)
    assert abs(one - whole[0, 89, 7]) > 1e-3
    assert alone == pytest.approx(whole[1, 0, 7], abs=1e-4)


def test_methods_and_budgets_become_rows():
    entries = parse_entries(("centroidkv", "chelsea-llama3"), ("1.0", "0.5", "512"))
    pairs = [(name, budget) for name in ("centroidkv", "chelsea-llama3") for budget in ("0.5", "512")]
    assert [(entry.name, entry.budget) for entry in entries] == [("full", "1.0"), *pairs]
    assert entries[1].method.budget == ckv.Budget(ratio=0.5)
    assert entries[2].method.budget == ckv.Budget(tokens=512)
    assert [e.name for e in parse_entries(("full", "centroidkv"), ("0.5",))] == ["full", "centroidkv"]
    for names, budgets, said in (
        (("nope",), ("0.5",), "Unknown method or preset 'nope'"),
        (("full",), ("half",), r"shares up to 1 such as 0.25, and rows such as 1024 up to .*, got 'half'"),
        (("full", "full"), ("0.5",), "--methods names the same twice: full and full"),
        (("snapkv",), ("0.5", "0.50"), "--budgets names the same twice: 0.5 and 0.50"),
        (("snapkv",), ("9" * 23,), "rows such as 1024 up to 1,073,741,824, got '9{23}'"),
        (("snapkv",), ("1.5",), "got '1.5'"),
        (("snapkv",), ("²",), "got '²'"),
        (("snapkv",), ("nan",), "got 'nan'"),
        (("snapkv",), ("0",), "got '0'"),
        ((), ("0.5",), "at least one"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_entries(names, budgets)


def test_a_budget_that_nobody_takes_is_refused():
    for names, budgets in ((("full",), ("1.0",)), (("full", "snapkv"), ("64",))):
        check_taken(parse_entries(names, budgets), budgets)
    with pytest.raises(ValueError, match=r"--budgets 0\.5 needs a method that takes a budget; full keeps everything\."):
        check_taken(parse_entries(("full",), ("0.5",)), ("0.5",))


def test_a_run_goes_on_with_the_calibration_that_it_began_with(tmp_path, small):
    """Another surrogate scores other rows: its answers are those of another run."""
    heads = ((0.5, 0.5),)
    for name, scale in (("own", 1), ("other", -1)):
        surrogate = ({"weights": np.full((32, 2), scale, np.float32), "bias": np.zeros(2, np.float32)},)
        measured = calibration.Calibration("small", heads, (), ((1.0, 1.0),), {}, surrogate=surrogate)
        calibration.write(tmp_path / f"{name}.safetensors", measured)
    options = ["--model", str(small), "--suite", "ruler", "--tasks", "vt", "--lengths", "416", "--limit", "1"]

    def run(method, folder, *more):
        return CliRunner().invoke(
            cli.app, ["evaluate", *options, *method.split(), "--output", str(tmp_path / folder), *more]
        )

    kvzap = "--methods kvzap --budgets 0.25"
    with_own, with_other = (("--calibration", str(tmp_path / f"{name}.safetensors")) for name in ("own", "other"))
    assert run(kvzap, "[/learned]", *with_own).exit_code == 0
    assert run(kvzap, "[/learned]", *with_own).exit_code == 0
    refused = run(kvzap, "[/learned]", *with_other)
    assert refused.exit_code == 2
    assert "holds a run with methods kvzap@0.25 = " in " ".join(refused.output.split())
    assert run("--methods full", "full").exit_code == 0
    joint = ["join", str(tmp_path / "[/learned]"), str(tmp_path / "full"), "--output", str(tmp_path / "joint")]
    assert CliRunner().invoke(cli.app, joint).exit_code == 0


def _table(folder):
    return (folder / "table.md").read_text(encoding="utf-8").splitlines()


def test_the_folder_is_named_after_what_sets_runs_apart():
    assert results_folder("ruler", "demo", seed=0, limit=None) == "results/ruler-demo"
    options = {"query-aware": True, "limit": 5, "data": "/some/where/questions", "dtype": "float32"}
    name = "results/niah-Qwen3-0.6B-main-query-aware-limit-5-data-questions-dtype-float32"
    assert results_folder("niah", "Qwen/Qwen3-0.6B@main", **options) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "0"], "--batch-size"),
        (["--batch-size", "-1"], "--batch-size"),
        (["--seed", "-1"], "--seed"),
        (["--limit", "0"], "--limit"),
        (["--lengths", "4³"], "--lengths takes whole numbers such as 4096, got '4³'"),
        (["--published", "nope"], "Published table 'nope' is unknown; known: centroidkv-longbench"),
        (["--budgets", "0.5,0.50"], "--budgets names the same twice"),
    ],
)
def test_wrong_options_are_named_before_a_model_is_loaded(arguments, said, tmp_path):
    command = ["evaluate", "--suite", "ruler", "--model", "nowhere/at-all", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, [*command, *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_the_command_answers_goes_on_and_joins(tmp_path, small):
    options = ["--model", str(small), "--suite", "ruler", "--tasks", "vt", "--lengths", "416", "--limit", "2"]
    options += ["--seed", "1", "--methods", "centroidkv", "--budgets", "0.75"]
    options += ["--published", "centroidkv-ruler-llama3.1-8b"]

    def run(*more):
        return CliRunner().invoke(cli.app, ["evaluate", *options, "--output", str(tmp_path / "out"), *more])

    result = run()
    assert result.exit_code == 0, result.output
    raw = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in raw.splitlines()]
    rows = [(line["method"], line["id"]) for line in lines]
    assert rows == [(method, f"vt/416/{i}") for method in ("full", "centroidkv") for i in (0, 1)]
    for line in lines:
        assert line["rows"] == int(float(line["budget"]) * line["tokens"])
        assert "variables" in line["question"]
        assert line["expected"]
        assert line["output"]
    config = json.loads((tmp_path / "out" / "run.json").read_text())
    assert set(config["sessions"][0]) == {"command", "started", "versions", "commit", "device", "answers", "seconds"}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| centroidkv | 75% | " in table
    assert "| *centroidkv, CentroidKV, Table 2, Llama-3.1-8B-Instruct* | 75% | 99.3 |" in table
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert run("--model", f"{small}/").exit_code == 0
    assert (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8") == raw
    added = run("--methods", "snapkv", "--budgets", "0.5")
    assert added.exit_code == 0, added.output
    assert [line for line in _table(tmp_path / "out") if line.startswith("| snapkv | 50% |")]
    assert (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").startswith(raw)
    raw = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8")
    refused = run("--query-aware")
    assert refused.exit_code == 2
    assert "holds a run with query_aware = False, not True" in refused.output.replace("\n", " ")
    joint = ["join", str(tmp_path / "out"), "--output", str(tmp_path / "joint"), "--published", ""]
    assert CliRunner().invoke(cli.app, joint).exit_code == 0
    assert (tmp_path / "joint" / "results.jsonl").read_text(encoding="utf-8") == raw
    assert "<svg" in (tmp_path / "joint" / "report.html").read_text()
    again = CliRunner().invoke(cli.app, joint)
    assert again.exit_code == 2
    assert "exists; name a new folder" in again.output.replace("\n", " ")
