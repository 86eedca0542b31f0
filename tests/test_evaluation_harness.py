"""lm-evaluation-harness's requests: with the full cache they are answered as its own Hugging Face backend does."""

# The harness is an extra that the type checker need not have.
# pyright: reportMissingImports=false

import json
import sys
from types import SimpleNamespace

import jax
import pytest

from clusterkv_jax.checkpoints import loading
from clusterkv_jax.models import llama, parameters
from tests.support.byte_model import BYTES, byte_tokenizer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.parity
SETTINGS = BYTES | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "bos_token_id": 256,
}
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = llama.from_hf(SETTINGS)
    params = jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, parameters.init(jax.random.key(0), config))
    loading.save_huggingface(folder, params, config, tokenizer_json=folder / "tokenizer.json", dtype="float32")
    names = {"eos_token": "<end>", "bos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def model(folder, **options):
    from clusterkv_jax.evaluation.lm_eval_model import CompressedLM

    return CompressedLM(model=str(folder), **{"batch_size": 4, **options})


def asked(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


PAIRS = asked((TEXT, " He went"), (TEXT, " to sea"), (TEXT[:50] + " ", "well"), ("", "Whale"))
WANTED = {"until": ["\n"], "max_gen_toks": 12}


def test_the_full_cache_gives_the_harness_own_numbers(folder):
    pytest.importorskip("torch")
    import torch
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(folder), device="cpu", dtype=torch.float32, batch_size=1)
    ours = model(folder)
    for mine, other in zip(ours.loglikelihood(PAIRS), theirs.loglikelihood(PAIRS, disable_tqdm=True), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    long = asked((TEXT * 4,), (TEXT,))  # the first needs two windows
    assert ours.loglikelihood_rolling(long) == pytest.approx(theirs.loglikelihood_rolling(long), abs=1e-3)
    texts = asked((TEXT, WANTED), (TEXT[:30], WANTED))
    assert ours.generate_until(texts) == theirs.generate_until(texts, disable_tqdm=True)


def test_a_task_of_the_harness_runs_on_a_compressed_cache(folder, tmp_path):
    """A local multiple-choice task, by the harness's evaluator and the model's registered name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from clusterkv_jax.evaluation import lm_eval_model

    lm_eval_model.register()
    rows = [{"q": TEXT + f" Number {i}.", "a": i % 2} for i in range(4)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "whales.yaml").write_text(
        f"task: whales\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: ['whale', 'ship']\n"
        "doc_to_target: a\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    arguments = f"model={folder},method=centroidkv,cache_tokens=90"
    results = simple_evaluate(
        "clusterkv",
        model_args=arguments,
        tasks=["whales"],
        batch_size=4,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    assert results.get("results", {})["whales"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)


def test_a_text_is_read_block_by_block_from_compressed_caches(folder, monkeypatch, caplog):
    from clusterkv_jax.evaluation import lm_eval_model

    monkeypatch.setattr(lm_eval_model, "BLOCK", 100)
    compressed = model(folder, method="centroidkv", cache_tokens=90)
    full = model(folder)
    text = asked((TEXT[:90],), (TEXT + TEXT[:90],))
    short, long = compressed.loglikelihood_rolling(text)
    assert (short, long) != full.loglikelihood_rolling(text)
    assert short == pytest.approx(full.loglikelihood_rolling(text)[0], abs=1e-4)  # nothing to compress in one block
    assert long != pytest.approx(full.loglikelihood_rolling(text)[1], abs=1e-2)


def test_answers_are_kept_as_they_come(folder):
    """Under what `--use_cache` looks them up by: the request's own arguments."""
    ours, kept = model(folder), {}
    ours.set_cache_hook(
        SimpleNamespace(add_partial=lambda name, args, answer: kept.update({(name, str(args)): answer}))
    )
    texts = asked((TEXT, WANTED), (TEXT[:30], WANTED))
    for name, requests in (("generate_until", texts), ("loglikelihood", PAIRS)):
        answers = getattr(ours, name)(requests)
        assert answers == [kept[name, str(request.args)] for request in requests]


def test_a_task_that_says_do_sample_is_drawn(folder):
    """Alone at temperature 1, as transformers draws; answers to equal questions differ, and come again."""
    ours, more = model(folder), {"max_gen_toks": 8}
    drawn = {"do_sample": True}, {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    first, again = (ours.generate_until(asked((TEXT, more | how), (TEXT, more | how))) for how in drawn)
    assert first == again
    assert first[0] != first[1]
    greedy = ours.generate_until(asked((TEXT, more), (TEXT, more | {"do_sample": False, "temperature": 0.7})))
    assert greedy[0] == greedy[1] != first[0]


def test_what_it_cannot_do_is_said(folder, caplog):
    ours = model(folder, max_length=64)
    with pytest.raises(ValueError, match="leave no room"):
        ours.generate_until(asked((TEXT, {"max_gen_toks": 64})))
    ours.loglikelihood(asked((TEXT, " whale")))
    assert "loses its first" in caplog.text
    for options, said in (
        ({"max_length": 1}, "max_length must be between 2 and the model's 256 positions, got 1"),
        ({"cache_ratio": 0.2, "cache_tokens": 9}, "not both"),
        ({"method": "centroidkv"}, "needs a budget"),
        ({"batch_size": "auto"}, r"--model_args, field 'batch_size': .* \('auto'\)"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"foo": 1}, "Unknown key 'foo' in --model_args; allowed: model, method, cache_ratio, "),
        ({"cache_tokens": "many"}, "field 'cache_tokens': Expected int | null, got str"),
    ):
        with pytest.raises(ValueError, match=said):
            model(folder, **options)


def test_tasks_that_make_texts_find_the_demo_models_tokenizer(monkeypatch):
    """They load it by the model's name, which would be one of the hub."""
    import lm_eval.__main__
    from transformers import AutoTokenizer

    from clusterkv_jax.evaluation import lm_eval_model

    given = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: given.append(sys.argv[-1]))
    monkeypatch.setattr(sys, "argv", ["lm_eval"])
    for argument in ("model=demo,method=full", "--model_args=method=full,model=demo", "model=demo-large"):
        lm_eval_model.main(["--model_args", argument])
    first, second, other = given
    folder = first.removeprefix("model=").removesuffix(",method=full")
    assert AutoTokenizer.from_pretrained(folder).encode("Call me Ishmael.")
    assert second == f"--model_args=method=full,model={folder}"
    assert other == "model=demo-large"
