"""An engine with a tiny model: who enters and leaves when, what is shared, what fails alone, and what is refused."""

import dataclasses
import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

import clusterkv_jax as ckv
from clusterkv_jax.calibration import PARTS, Calibration
from clusterkv_jax.engine import prefill
from clusterkv_jax.runtime import programs
from tests.support.byte_model import byte_tokenizer
from tests.support.tiny import prompt, random_params, tiny, with_surrogate

METHOD = ckv.CentroidKV(ckv.Budget(ratio=0.5), sinks=2, recent=4, chunk=16, interval=4)
SIZES = {"slots": 3, "max_tokens": 128, "reserve": 64}
EIGHT = {"max_new_tokens": 8}
WARM = ckv.Sampling(temperature=0.8, top_k=20, top_p=0.9)


@functools.cache
def written() -> ckv.Model:
    """A tiny model whose tokens are bytes."""
    config = dataclasses.replace(tiny().config, vocab_size=257, num_layers=1)
    return ckv.Model(random_params(config), config, _Tokenizer(), None, "written")


class _Tokenizer:
    def __init__(self):
        self.bytes = byte_tokenizer()

    def encode(self, text, add_special_tokens=True):
        return self.bytes.encode(text).ids

    def decode(self, tokens, skip_special_tokens=True):
        return self.bytes.decode(tokens)


@functools.cache
def alone(seed, length, question=0, new=8, sampling=None, eos=()):
    """What `generate` says."""
    questions = [prompt(900 + question, question)] if question else None
    options = {"max_new_tokens": new, "sampling": sampling, "seed": seed, "method": METHOD}
    return tuple(ckv.generate(tiny(eos=eos), [prompt(seed, length)], questions=questions, **options).tokens[0])


def engine(model=None, **options):
    return ckv.Engine(model or tiny(), **{"method": METHOD, **SIZES, **options})


def test_times_leave_compiling_out():
    served = ckv.Engine(tiny(), method=METHOD, slots=5, max_tokens=112, reserve=48)  # which nothing else compiles
    begin = time.perf_counter()
    stats = served.add(prompt(5, 21), max_new_tokens=3).result().stats
    elapsed = time.perf_counter() - begin
    assert 0 < stats.ttft_s + 2 * stats.tpot_s <= elapsed - stats.compile_s
    assert stats.compile_s > stats.ttft_s > 0


def test_requests_outnumber_slots_and_come_out_as_if_alone():
    served = engine()
    cases = [(seed, 20 + seed, 3 * (seed % 2), 3 + seed, WARM if seed % 3 == 0 else None) for seed in range(8)]
    handles = [
        served.add(prompt(seed, n), prompt(900 + q, q) if q else None, max_new_tokens=new, sampling=how, seed=seed)
        for seed, n, q, new, how in cases
    ]
    assert [handle.state for handle in handles] == ["waiting"] * 8
    served.step()
    assert [handle.state for handle in handles[:3]].count("waiting") == 0
    served.run()
    assert [tuple(handle.result().tokens[0]) for handle in handles] == [alone(*case) for case in cases]
    stats = served.stats()
    assert (stats.finished, stats.waiting, stats.active) == (8, 0, 0)
    assert stats.new_tokens == sum(case[3] for case in cases)
    assert 0 < stats.occupancy <= 1
    assert stats.tokens_per_s > 0 < stats.ttft_s <= stats.longest_ttft_s
    result = handles[1].result().stats
    assert result.cache_bytes < result.full_cache_bytes
    assert (result.prompt_tokens, result.question_tokens, result.new_tokens) == ([21], [3], [4])


def test_a_sequence_ends_with_the_token_that_ends_a_text():
    end = alone(5, 25)[3]
    served = engine(tiny(eos=(end,)))
    handle = served.add(prompt(5, 25), seed=5, **EIGHT)
    assert handle.result().tokens[0] == list(alone(5, 25, eos=(end,)))


def test_warm_programs_serve_whatever_comes():
    served = engine()
    for number in range(2):
        context = served.read(prompt(number, 40))
        served.add(context, prompt(1, 5), max_new_tokens=40)
        served.add(prompt(2, 60), max_new_tokens=3, sampling=WARM)
        served.run()
    with programs.compilation() as total:
        context = served.read(prompt(7, 33))
        handles = [served.add(context, prompt(8, n), max_new_tokens=n, sampling=WARM, seed=n) for n in (2, 9, 17)]
        handles += [served.add(prompt(9, n), max_new_tokens=5) for n in (20, 64)]
        served.step()
        handles[1].cancel()
        served.run()
    assert total.programs == 0
    assert all(handle.done for handle in handles)


def test_a_context_is_read_once_and_asked_often():
    served = engine()
    context = served.read(prompt(3, 50), seed=3)
    handles = [served.add(context, prompt(900 + n, n), seed=3, **EIGHT) for n in (1, 2, 3, 4, 5)]
    assert [tuple(handle.result().tokens[0]) for handle in handles] == [alone(3, 50, n) for n in (1, 2, 3, 4, 5)]
    assert tuple(served.add(context, **EIGHT).result().tokens[0]) == alone(3, 50)
    assert served.stats().contexts == {"device": 1, "host": 0, "disk": 0}
    served.drop(context)
    assert served.stats().context_bytes == {"device": 0, "host": 0, "disk": 0}
    assert tuple(served.add(context, **EIGHT).result().tokens[0]) == alone(3, 50)  # read once more


def test_equal_neighbours_are_read_once(monkeypatch):
    lengths = []
    read = prefill.prefill_batch
    monkeypatch.setattr(prefill, "prefill_batch", lambda *args: lengths.append(len(args[3].texts[0])) or read(*args))
    served, seen = engine(), []
    asked = [(3, 50, n) for n in (1, 2, 3, 4, 5)] + [(5, 40, 2), (5, 40, 3), (3, 50, 5)]
    prompts, questions = [prompt(s, n) for s, n, _ in asked], [prompt(900 + q, q) for _, _, q in asked]
    results = served.generate(prompts, questions=questions, on_stats=seen.append, seed=3, **EIGHT)
    assert [tuple(result.tokens[0]) for result in results] == [alone(*case) for case in asked]
    assert lengths == [50, 40, 50]
    assert list(dict.fromkeys(stats.finished for stats in seen if stats.finished)) == [3, 6, 8]


def test_what_one_of_many_cannot_be_leaves_nothing_behind():
    served = engine()
    with pytest.raises(ValueError, match="exceed the engine's max_tokens"):
        served.generate([prompt(1, 20), prompt(2, 130)], **EIGHT)
    with pytest.raises(ValueError, match="Questions must be one per prompt, got 1 for 2 prompts"):
        served.generate([prompt(1, 20), prompt(2, 20)], questions=[prompt(3, 2)], **EIGHT)
    assert (served.stats().waiting, served.stats().active) == (0, 0)


def test_contexts_go_from_the_device_to_the_host_to_disk_and_back(tmp_path):
    each = engine().memory.contexts // 2
    limits = {"context_bytes": each, "context_host_bytes": each, "context_disk_bytes": 2 * each}
    served = engine(**limits, context_folder=tmp_path)
    contexts = [served.read(prompt(seed, 40), seed=seed) for seed in range(5)]
    assert served.stats().contexts == {"device": 1, "host": 1, "disk": 2}  # the first one is nowhere
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    for seed in (0, 4, 2, 1, 3, 3):
        handle = served.add(contexts[seed], prompt(902, 2), seed=seed, **EIGHT)
        assert tuple(handle.result().tokens[0]) == alone(seed, 40, 2)
        nbytes = served.stats().context_bytes
        assert nbytes["device"] <= each >= nbytes["host"]
        assert nbytes["disk"] <= 2 * each
    served.close()
    assert list(tmp_path.iterdir()) == []


def test_a_slot_of_the_full_cache_is_all_of_it():
    served = engine(method=ckv.Full())
    for length in (20, 90):
        stats = served.add(prompt(1, length), **EIGHT).result().stats
        assert stats.cache_bytes == stats.full_cache_bytes


def test_a_completed_method_reads_what_an_engine_writes(tmp_path):
    """Shares of a calibration are the method's own for an engine; `load_cache` knows no model."""
    rising = np.linspace(-3, 0, len(PARTS))
    scores = ((tuple(rising.tolist()), tuple((rising + 0.5).tolist())),) * 2
    heads = ((0.5, 0.5),) * 2
    model = dataclasses.replace(
        with_surrogate(tiny()), calibration=Calibration("tiny", heads, (), heads, {}, scores, heads)
    )
    method = ckv.OrbitKV(ckv.Budget(ratio=0.5), sinks=2, recent=4)
    served, file = engine(model, method=method), tmp_path / "context.safetensors"
    served.save(served.read(prompt(3, 50)), file)
    with pytest.raises(ValueError, match=r"; clusterkv_jax\.completed\(model, method\) has what a calibration says\."):
        ckv.load_cache(file, model.config, method)
    with pytest.raises(ValueError, match=r"not by Full\(.*\)\.$"):
        ckv.load_cache(file, model.config, ckv.Full())
    completed = ckv.completed(model, method)
    assert completed.budget.shares is not None
    assert ckv.completed(model, completed) == completed
    ckv.load_cache(file, model.config, completed)


def test_heads_of_unequal_budgets_are_served_and_saved(tmp_path):
    """They return to their budgets while decoding, each in its own pages, in a slot and from a file alike."""
    shares = ((1.5, 0.5), (0.5, 1.5))
    method, file = dataclasses.replace(METHOD, budget=ckv.Budget(ratio=0.5, shares=shares)), tmp_path / "file"
    served, texts, question = engine(method=method), [prompt(3, 50), prompt(4, 34)], prompt(904, 4)
    asked = [served.add(text, question, max_new_tokens=12) for text in texts]
    expected = [ckv.generate(tiny(), [x], questions=[question], method=method, max_new_tokens=12) for x in texts]
    assert [handle.result().tokens for handle in asked] == [result.tokens for result in expected]
    served.save(served.read(texts[0]), file)
    loaded = ckv.load_cache(file, tiny().config, method)
    assert all(isinstance(layer, ckv.PagedHeads) and layer.head_slots for layer in loaded.layers)
    again = engine(method=method).add(file, question, max_new_tokens=12).result()
    assert again.tokens == expected[0].tokens


def test_compression_is_compiled_when_it_is_due():
    """Of layers with unlike budgets too, whose questions enter as those of any."""
    shares = ((2.2, 1.0), (0.5, 0.3))
    method = dataclasses.replace(METHOD, budget=ckv.Budget(ratio=0.5, shares=shares), interval=8)
    served, text, question = engine(method=method), prompt(3, 50), prompt(904, 4)

    def said(new):
        return served.add(text, question, max_new_tokens=new).result().tokens

    def alone(new):
        return ckv.generate(tiny(), [text], questions=[question], method=method, max_new_tokens=new).tokens

    assert said(3) == alone(3)
    before = served.stats().programs
    assert said(4) == alone(4)
    assert served.stats().programs == before
    assert said(20) == alone(20)
    assert served.stats().programs > before


@pytest.mark.parametrize("shares", [None, ((1.5, 0.5), (0.5, 1.5))])
def test_a_cache_that_prefill_made_is_asked(tmp_path, shares):
    model, method, text = tiny(), ckv.SnapKV(ckv.Budget(ratio=0.5, shares=shares), window=4), prompt(3, 50)
    cache, _ = ckv.prefill(model.params, model.config, method, jnp.array([text]), jnp.array([50]), reserve=20)
    ckv.save_cache(tmp_path / "file", cache, model.config, method)
    question = prompt(904, 4)
    result = engine(method=method).add(tmp_path / "file", question, **EIGHT).result()
    assert result.tokens == ckv.generate(model, [text], questions=[question], method=method, **EIGHT).tokens


def test_text_comes_in_pieces_and_stops():
    served = engine(written(), method=ckv.Full())
    free = served.add("Some text to begin with.", max_new_tokens=40).result().texts[0]
    stop = free[5:7]
    pieces, handles = {}, []
    handles.append(served.add("Some text to begin with.", max_new_tokens=40))
    handles.append(served.add("Some text to begin with.", max_new_tokens=40, stop=[stop]))
    for handle, text in served.stream():
        pieces[handle] = pieces.get(handle, "") + text
    assert pieces[handles[0]] == handles[0].result().texts[0] == free
    assert pieces[handles[1]] == handles[1].result().texts[0] == free[: free.index(stop)]
    assert len(handles[1].result().tokens[0]) < 40
    one = ckv.generate(written(), ["Some text to begin with."], max_new_tokens=40, stop=[stop])
    assert handles[1].result().tokens == one.tokens


def test_who_cancels_leaves_no_reading_behind():
    """What is read once for two requests is there no longer than the second one waits."""
    served = engine(slots=1)
    first, second = (served.add(prompt(1, 30), max_new_tokens=4) for _ in range(2))
    begin = sum(x.nbytes for x in jax.live_arrays())
    first.result()
    second.cancel()
    del first, second
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays()) <= begin


def test_who_cancels_leaves_a_slot_and_keeps_what_was_said():
    served = engine(slots=1)
    running, waiting, last = (served.add(prompt(seed, 30), max_new_tokens=60, seed=seed) for seed in (1, 2, 3))
    served.step()
    waiting.cancel()
    running.cancel()
    running.cancel()
    assert (running.state, waiting.state, last.state) == ("cancelled", "cancelled", "waiting")
    said = running.result().tokens[0]
    assert 0 < len(said) < 60
    assert tuple(said) == alone(1, 30, new=60)[: len(said)]
    assert waiting.result().tokens == [[]]
    assert tuple(last.result().tokens[0]) == alone(3, 30, new=60)
    assert served.stats().cancelled == 2


def test_a_request_fails_alone():
    model, poison = tiny(), 7
    embed = model.params["embed"].at[poison].set(jnp.nan)
    broken = dataclasses.replace(model, params={**model.params, "embed": embed})
    served, text = engine(broken), [token for token in prompt(1, 40) if token != poison][:30]
    bad = served.add([*text[:5], poison, *text[5:]], **EIGHT)
    asked = served.add(text, [poison], **EIGHT)
    good = served.add(text, max_new_tokens=4)
    served.run()
    for handle in (bad, asked):
        with pytest.raises(ValueError, match="are not finite numbers; the first numbers that are not come from"):
            handle.result()
    alike = ckv.generate(broken, [text], method=METHOD, max_new_tokens=4)
    assert good.result().tokens == alike.tokens
    assert (served.stats().failed, served.stats().finished) == (2, 1)


@pytest.mark.wrong_arguments
def test_what_cannot_be_served_is_said_at_once(tmp_path):
    served, text = engine(), prompt(1, 20)
    other = engine().read(text)
    wrong = [
        ((text,), {"max_new_tokens": 120}, "exceed the engine's max_tokens = 128"),
        ((text, prompt(2, 60)), {"max_new_tokens": 10}, "exceed the engine's reserve = 64"),
        ((prompt(1, 250),), EIGHT, "exceed the model's 256 positions"),
        (([],), {}, "prompt 0 is empty"),
        (([99] * 20,), {}, "holds token id 99"),
        (("text",), {}, "has no tokenizer"),
        ((text,), {"sampling": 0.5}, "sampling must be"),
        ((text,), {"seed": -1}, "seed must be"),
        ((text,), {"stop": [""]}, "stop must be"),
        ((text,), {"max_new_tokens": 0}, "max_new_tokens must be"),
        ((prompt(1, 5),), EIGHT, "has a budget of 2 rows"),
        ((other,), {}, "context must be one that this engine has read"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            served.add(*arguments, **options)
    assert served.stats().waiting == 0
    for options, message in [
        ({"slots": 0}, "slots must be a whole number of at least 1"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1"),
        ({"method": ckv.Full}, "method must be an object"),
        ({"context_folder": tmp_path / "none"}, "context_folder must be a folder that exists"),
        ({"device_bytes": 1000}, "An engine of 3 slots needs .* take fewer slots"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine(**options)


def test_the_plan_of_memory_counts_what_is_there():
    small, large = engine().memory, engine(slots=6).memory
    assert large.slots == 2 * small.slots
    assert small.total == small.weights + small.slots + small.prompt + small.contexts
    assert engine(method=ckv.Full()).memory.slots > small.slots
    assert engine(device_bytes=small.total).memory == small
    left = 10 * small.total - small.total + small.contexts
    assert engine(device_bytes=10 * small.total).memory.contexts == left // 2


def test_a_queue_that_is_full_is_worked_on():
    served = engine(max_waiting=2)
    handles = [served.add(prompt(seed, 20), max_new_tokens=2, seed=seed) for seed in range(9)]
    assert served.stats().waiting <= 2
    assert served.stats().finished > 0
    served = engine(max_waiting_bytes=400)
    handles += [served.add(prompt(seed, 20), max_new_tokens=2, seed=seed) for seed in range(9)]
    assert served.stats().waiting <= 2
    tokens = [tuple(handle.result().tokens[0]) for handle in handles]
    assert tokens == [alone(seed, 20, new=2) for seed in range(9)] * 2


class Requests(RuleBasedStateMachine):
    """Add, cancel and step in any order: whoever is not cancelled says what it says alone."""

    @initialize()
    def begin(self):
        self.served, self.context = engine(slots=2), None
        self.alive, self.cancelled = {}, {}

    # No seed 0: it says four equal tokens in a row, whose keys in the first layer are equally alike, but for rounding.
    @rule(seed=st.integers(1, 4), new=st.sampled_from([1, 5, 40]), asked=st.sampled_from([0, 3]), warm=st.booleans())
    def add(self, seed, new, asked, warm):
        sampling, question = WARM if warm else None, prompt(900 + asked, asked) if asked else None
        handle = self.served.add(prompt(seed, 20), question, max_new_tokens=new, sampling=sampling, seed=seed)
        self.alive[handle] = (seed, 20, asked, new, sampling)

    @rule(new=st.sampled_from([1, 5]))
    def ask(self, new):
        self.context = self.context or self.served.read(prompt(1, 20), seed=1)
        handle = self.served.add(self.context, prompt(903, 3), max_new_tokens=new, seed=1)
        self.alive[handle] = (1, 20, 3, new, None)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        handle = data.draw(st.sampled_from(list(self.alive)))
        handle.cancel()
        self.cancelled[handle] = self.alive.pop(handle)

    @rule()
    def step(self):
        self.served.step()

    @invariant()
    def slots_are_those_of_live_requests(self):
        if not hasattr(self, "served"):
            return
        stats, states = self.served.stats(), [handle.state for handle in self.alive]
        assert stats.active == states.count("active") <= 2
        assert stats.waiting == states.count("waiting")

    @override
    def teardown(self):
        if not hasattr(self, "served"):
            return
        self.served.run()
        for handle, case in self.alive.items():
            assert tuple(handle.result().tokens[0]) == alone(*case)
        for handle, case in self.cancelled.items():
            said = tuple(handle.result().tokens[0])
            assert said == alone(*case)[: len(said)]


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
