"""An engine that hears the calls of another does what that one did, pauses and cancellations included."""

import gc
from dataclasses import replace

import pytest

from clusterkv_jax.engine import SamplingParams
from clusterkv_jax.engine.replicated import FollowingEngine, LeadingEngine, follow
from tests.engine.test_engine import METHOD, SIZES, alone
from tests.support.tiny import prompt, tiny

OPTIONS = {"method": METHOD, **SIZES, "prefill_tokens": 1}
COUNTED = ("new_tokens", "steps", "finished", "failed", "cancelled", "active", "waiting", "contexts", "context_bytes")


def test_calls_are_made_again(monkeypatch):
    calls: list[str] = []
    leading = LeadingEngine(tiny(), calls.append, **OPTIONS)
    one, other = (leading.read(prompt(seed, 50), seed=seed) for seed in (1, 2))
    eight = SamplingParams(max_tokens=8, seed=1, stop=(), logit_bias={3: 0.0})
    asked = [leading.request(one, prompt(904, 4), params=eight)]
    asked.append(leading.request(prompt(5, 30), params=replace(eight, seed=5, n=2), stream=True, keep=True))
    gone = leading.request(prompt(6, 100), params=eight)
    leading.on_pause(lambda: leading.cancel(gone.request_id))  # while it is read
    handles = [handle for request in [*asked, gone] for handle in leading.submit(request)]
    while leading.busy:
        leading.step()
    leading.drop(other)
    kept = handles[1].context
    assert kept is not None
    left = leading.compact(kept)
    (last,) = leading.submit(leading.request(left, prompt(907, 3), params=eight))
    number = kept.number
    handles[1].context = kept = None
    gc.collect()
    leading.run()
    assert number not in dict(leading._contexts._held["device"])
    last.result()
    assert tuple(handles[0].result().tokens[0]) == alone(1, 50, 4)
    assert [handle.state for handle in handles] == ["finished"] * 3 + ["cancelled"]
    told = leading.stats()
    leading.close()

    followers: list[FollowingEngine] = []
    make = FollowingEngine.__init__

    def remembered(self, *args, **how):
        followers.append(self)
        make(self, *args, **how)

    monkeypatch.setattr(FollowingEngine, "__init__", remembered)
    heard = iter(calls)

    def hear() -> str:
        call = next(heard)
        if '"close"' in call:
            stats.append(followers[0].stats())
        return call

    stats = []
    follow(tiny(), hear, **OPTIONS)
    assert next(heard, None) is None
    assert [getattr(stats[0], name) for name in COUNTED] == [getattr(told, name) for name in COUNTED]


def test_what_needs_one_process_is_refused():
    with pytest.raises(ValueError, match="A context folder needs an engine of one process"):
        LeadingEngine(tiny(), print, context_folder=".", **OPTIONS)
    leading = LeadingEngine(tiny(), lambda call: None, **OPTIONS)
    with pytest.raises(ValueError, match="need a server of one process"):
        leading.request(prompt(1, 20), allowed_tokens=lambda tokens: None)
