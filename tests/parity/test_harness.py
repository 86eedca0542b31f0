"""lm-evaluation-harness's requests: with the full cache they are answered as its own Hugging Face backend does.

`make parity` runs them: the extra `parity` brings the harness, which the environment of `make test` does not have.
"""

# The harness is an extra that the type checker need not have.
# pyright: reportMissingImports=false

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from clusterkv_jax.checkpoints import loading
from clusterkv_jax.models import llama, parameters
from tests.support.byte_model import BYTES, byte_tokenizer
from tests.support.job import Job

pytest.importorskip("lm_eval")
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


TASK = """task: whales
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
doc_to_text: '{{q}}'
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: ['whale', 'ship']
doc_to_target: a
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXTS = """output_type: generate_until
doc_to_target: '{{a}}'
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def evaluated(folder, rows, kind, arguments, batch_size) -> Any:
    """What the harness's evaluator finds of a local task in `folder`, by the model's registered name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from clusterkv_jax.evaluation import lm_eval_model

    lm_eval_model.register()
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "whales.yaml").write_text(TASK.replace("ROWS", str(folder / "rows.json")) + kind)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    asked = {"tasks": ["whales"], "batch_size": batch_size, "bootstrap_iters": 0, "task_manager": tasks}
    return simple_evaluate("clusterkv", model_args=arguments, **asked)


def test_a_task_of_the_harness_runs_on_a_compressed_cache(folder, tmp_path):
    rows = [{"q": TEXT + f" Number {i}.", "a": i % 2} for i in range(4)]
    results = evaluated(tmp_path, rows, CHOICE, f"model={folder},method=centroidkv,cache_tokens=90", 4)
    assert results["results"]["whales"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)


def command(*arguments):
    """Of each of several processes of `clusterkv lm-eval`."""

    def of_process(folder, address, count, index):
        who = ["--coordinator-address", address, "--num-processes", count, "--process-id", index, "--distributed"]
        return ["-m", "clusterkv_jax.cli", "lm-eval", "--model", "clusterkv", "--output_path", folder, *who, *arguments]

    return of_process


# Each process imports torch and the harness, which takes twenty seconds: ARGS="-m exhaustive".
@pytest.mark.exhaustive
def test_the_harness_asks_two_processes(folder, tmp_path):
    """Its answers are those that one process gives it."""
    rows = [{"q": f"Call me Ishmael, {i} times. " * (3 + i % 4), "a": "no"} for i in range(8)]
    arguments = f"model={folder},method=snapkv,cache_ratio=0.5"
    alone = evaluated(tmp_path, rows, TEXTS, arguments, 2)["samples"]["whales"]
    options = f"--model_args {arguments} --batch_size 2 --tasks whales --include_path {tmp_path} --log_samples"
    kept = "--cache-folder", jax.config.jax_compilation_cache_dir
    job = Job(tmp_path / "results", command(*options.split(), *kept))
    job.start(2, HF_DATASETS_CACHE=tmp_path / "data")
    ends = job.ends(seconds=300)
    assert [code for code, _ in ends] == [0, 0], ends
    assert "whales" in ends[0][1]
    [file] = job.folder.rglob("samples_whales*.jsonl")
    lines = list(map(json.loads, file.read_text().splitlines()))
    assert len(lines) == len(rows)
    assert [(line["doc_id"], line["resps"]) for line in lines] == [(one["doc_id"], one["resps"]) for one in alone]


@pytest.mark.exhaustive
def test_a_harness_that_refuses_ends_all(tmp_path):
    job = Job(tmp_path / "results", command("--nonsense"))
    job.start(2)
    for code, said in job.ends():
        assert code == 2, said
        assert re.search(r"Error: (Process 0 .* ended: )?The harness ended with 2; it says why above\.", said)


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
