"""Every method in an engine: greedy and drawn tokens, rows and what was recalled are those of `generate` one by one."""

from dataclasses import replace

import pytest

import clusterkv_jax as ckv
from tests.support.methods import every_method, fitted_method, named
from tests.support.tiny import prompt, taught

BUDGET = ckv.Budget(ratio=0.4)
WORDS = ((3, 5), (7, 1, 4), (2,))
CLUSTERS = ckv.ClusterKV(
    BUDGET, sinks=2, tokens_per_cluster=4, interval=8, interval_clusters=2, dense_layers=0, max_iterations=4
)
METHODS = [
    ckv.Full(),
    *every_method(BUDGET),
    fitted_method(BUDGET),
    ckv.Chelsea(BUDGET, sinks=2, recent=4, chunk=16, outlier_heads=((0, 1),)),
    ckv.Composed(ckv.GravityKV(BUDGET, sinks=2, recent=4, chunk=16), ckv.Full()),
    ckv.SnapKV(ckv.Budget(tokens=70), window=4, kernel=3),  # a budget that shorter prompts do not fill
    ckv.SnapKV(ckv.Budget(ratio=0.3, base="prompt+new"), window=4, kernel=3),
    ckv.StreamingLLM(BUDGET, rerotate=True),
    ckv.Compactor(BUDGET, sinks=2, recent=2, chunk=16),
    ckv.KVzip(BUDGET, plus=True, chunk=16, instruction=WORDS),
    ckv.KVzip(BUDGET, scope="layer", chunk=16, instruction=WORDS),
    ckv.Quest(BUDGET, page=4, min_pages=2, dense_layers=0),
    ckv.Quest(ckv.Budget(tokens=66), page=4, min_pages=2, dense_layers=1),
    ckv.InfiniGen(BUDGET, partial_ratio=0.5),
    ckv.InfiniGen(BUDGET, partial_ratio=0.5, alpha=1.0),
    CLUSTERS,
    replace(CLUSTERS, store="host", cached_steps=2),
]
# Tokens of prompt, question (0: none) and answer; temperatures. Two widths, more requests than slots. `generate` reads
# two each by the same programs.
REQUESTS = [(40, 0, 12, 0.9), (90, 70, 30, 0.0), (40, 3, 20, 0.9), (70, 66, 9, 0.0), (64, 0, 50, 0.9), (40, 16, 3, 0.9)]


# A token that is there twice has the same score twice in the first layer, but for the last bits, in which a batch of
# another size differs; DropKV squares differences as small. `generate` differs there from itself in a batch, too.
TIED = ("DropKV", "KVzap", "OrbitKV", "LargeValues")


def said_alike(method, tokens, alone, asked):
    """Whether both say the same; of methods that break ties whether they are as long, and begin alike at the prompt."""
    if named(method) not in TIED:
        return tokens == alone
    return len(tokens) == len(alone) and (asked or tokens[0] == alone[0])


# One of each way to hold rows; the others are tried with ARGS="-m exhaustive".
ORDINARY = ("Full", "GravityKV", "SnapKV", "H2O", "AdaKV", "Quest", "ClusterKV")
# Of these one layer is as another, and one compiles twice as fast.
ALIKE = ("GravityKV", "SnapKV", "H2O", "ClusterKV")
CASES = [
    pytest.param(method, id=named(method), marks=[pytest.mark.exhaustive] * (named(method) not in ORDINARY))
    for method in METHODS
]


@pytest.mark.parametrize("method", CASES)
def test_an_engine_says_what_generate_says(method):
    model = taught(layers=1 if named(method) in ALIKE else 2)
    engine = ckv.Engine(model, method=method, slots=3, max_tokens=200, reserve=100)
    handles, alone = [], []
    for i, (tokens, asked, new, temperature) in enumerate(REQUESTS):
        sampling = ckv.Sampling(temperature=temperature)
        text, question = prompt(i, tokens), prompt(100 + i, asked) if asked else None
        options = {"max_new_tokens": new, "sampling": sampling, "seed": i}
        handles.append(engine.add(text, question, **options))
        alone.append((text, [question] if asked else None, options))
    engine.run()
    for handle, (text, questions, options) in zip(handles, alone, strict=True):
        one, result = ckv.generate(model, [text], questions=questions, method=method, **options), handle.result()
        assert said_alike(method, result.tokens[0], one.tokens[0], questions)
        for name in ("kept_rows", "prompt_tokens", "question_tokens", "new_tokens", "moved_bytes"):
            assert getattr(result.stats, name) == getattr(one.stats, name), name
        if one.stats.recalled_rows:  # a short prompt is read whole, of which only an engine makes a recall
            assert result.stats.recalled_rows == one.stats.recalled_rows
            assert result.stats.union_rows == one.stats.union_rows
