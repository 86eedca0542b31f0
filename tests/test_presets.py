"""Presets: the papers' numbers by name, and one sentence for each mistake."""

import pytest

from clusterkv_jax.budget import Budget
from clusterkv_jax.methods import (
    H2O,
    CaM,
    CentroidKV,
    Chelsea,
    ChunkKV,
    Compactor,
    DropKV,
    ExpectedAttention,
    Full,
    GravityKV,
    KeyDiff,
    LagKV,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from clusterkv_jax.presets import list_presets, preset, read_preset

HALF = Budget(ratio=0.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", Full()),
        ("centroidkv", CentroidKV(HALF, sinks=16, recent=64, chunk=256, merge_ratio=0.8, merge_of="A", interval=128)),
        ("chelsea", Chelsea(HALF)),
        ("chelsea-llama2", Chelsea(HALF, r_init=0.45, r_decay=0.05, r_steps=3, r_min=0.05)),
        ("chelsea-llama3", Chelsea(HALF, r_init=0.35, r_decay=0.1, r_steps=2, r_min=0.05)),
        ("gravitykv", GravityKV(HALF)),
        ("snapkv", SnapKV(HALF)),
        ("snapkv-kvpress", SnapKV(HALF, window=64, kernel=5, pooling="avg", pool_before_group=True)),
        ("pyramidkv-kvpress", PyramidKV(HALF, window=64, kernel=5, pooling="avg")),
        ("chunkkv", ChunkKV(HALF)),
        ("chunkkv-kvpress", ChunkKV(HALF, window=64, chunk=20, mode="kvpress")),
        ("expectedattention", ExpectedAttention(HALF)),
        ("expectedattention-adakv", ExpectedAttention(HALF, epsilon=0.01, scope="layer")),
        ("keydiff", KeyDiff(HALF)),
        ("lagkv", LagKV(HALF)),
        ("compactor", Compactor(HALF)),
        ("dropkv", DropKV(HALF)),
        ("h2o", H2O(HALF)),
        ("streamingllm", StreamingLLM(HALF)),
        ("cam", CaM(HALF)),
        ("chelsea-qwen", Chelsea(HALF, r_init=0.2, r_decay=0.1, r_steps=2, r_min=0.05)),
    ],
)
def test_presets_carry_the_papers_settings(name, expected):
    assert preset(name, None if name == "full" else HALF) == expected


def test_every_preset_says_what_it_is_and_where_it_comes_from():
    for name, entry in list_presets().items():
        assert entry.name == name
        assert entry.source
        assert "\n" not in entry.description


def test_settings_given_at_use_go_before_the_preset():
    assert preset("chelsea-llama3", HALF, chunk=64) == Chelsea(HALF, chunk=64, r_init=0.35, r_decay=0.1, r_steps=2)


def _write(folder, settings="", budget="", method="Chelsea"):
    file = folder / "mine.yaml"
    file.write_text(f"method: {method}\ndescription: mine\nsource: mine\n{settings}\n{budget}\n")
    return file


def test_a_file_of_ones_own(tmp_path):
    file = _write(tmp_path, "settings: {sinks: 4, outlier_heads: [[0, 0], [0, 1]]}", "budget: {tokens: 512}")
    expected = Chelsea(Budget(tokens=512), sinks=4, outlier_heads=((0, 0), (0, 1)))
    assert preset(str(file)) == expected
    assert preset(str(file), HALF) == Chelsea(HALF, sinks=4, outlier_heads=((0, 0), (0, 1)))
    for shares in ("pyramid", [1, 2.5], [[1, 2], [3, 1]]):
        budget = read_preset(_write(tmp_path, budget=f"budget: {{ratio: 1, shares: {shares}}}")).budget
        assert budget == Budget(1.0, shares=shares if shares == "pyramid" else tuple(map(_as_tuple, shares)))


def _as_tuple(share):
    return tuple(share) if isinstance(share, list) else share


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"settings": "settings: {sink: 4}"}, r"Unknown key 'sink' .*allowed: sinks, recent, chunk, r_init"),
        ({"settings": "setting: {sinks: 4}"}, r"Unknown key 'setting' .*allowed: method, description"),
        ({"settings": "settings: {sinks: four}"}, r"Key 'sinks' .*must be a whole number, got 'four'"),
        ({"settings": "settings: {r_init: true}"}, r"Key 'r_init' .*must be a number, got True"),
        ({"settings": "settings: {sinks: 1.5}"}, r"Key 'sinks' .*must be a whole number, got 1.5"),
        ({"settings": "settings: {outlier_heads: [[0]]}"}, r"Key 'outlier_heads' .*must be a list of "),
        ({"settings": "settings: {r_init: 2}"}, r"Impossible setting .*r_init must be between 0 and 1, got 2"),
        ({"settings": "settings: [sinks]"}, r"Expected keys and values in 'settings'"),
        (
            {"settings": "settings: {merge_of: C}", "method": "CentroidKV"},
            r"'merge_of' .*one of 'A', 'middle', got 'C'",
        ),
        (
            {"method": "Chelsae"},
            r"Key 'method' .*must be one of AdaKV, Auto, CaM, CentroidKV, Chelsea, .*, got 'Chelsae'",
        ),
        (
            {"budget": "budget: {share: 0.5}"},
            r"Unknown key 'share' in 'budget' .*allowed: ratio, tokens, base, bytes, shares",
        ),
        ({"budget": "budget: {ratio: half}"}, r"Key 'ratio' .*must be a number or null, got 'half'"),
        (
            {"budget": "budget: {ratio: 1, shares: [x]}"},
            r"Key 'shares' .*must be one of 'pyramid' or a list of numbers or lists of numbers or null, got \['x'\]",
        ),
        ({"budget": "budget: {ratio: 1, shares: [1, [1]]}"}, r"Budget shares must be .*, got \(1.0, \(1.0,\)\)"),
        ({"budget": "budget: {ratio: -1}"}, r"Budget ratio must be a number above 0, got -1"),
        (
            {"settings": "settings: {interval: 1000000000000}", "method": "GravityKV"},
            r"Key 'interval' .*up to 1,073,741,824",
        ),
        ({"settings": "settings: {sinks: 4, sinks: 8}"}, r"mine.yaml, line 4: The key 'sinks' stands twice"),
        ({"settings": "method: Full"}, r"mine.yaml, line 4: The key 'method' stands twice"),
        ({"settings": "settings: &x {outlier_heads: [*x]}"}, r"mine.yaml, line 4: Aliases are not allowed"),
        ({"settings": "settings: " + "[" * 100_000}, r"mine.yaml, line 4: More than 32 levels are not allowed"),
        ({"settings": "settings: {sinks: .nan}"}, r"mine.yaml, line 4: .nan is not a finite number"),
        (
            {"budget": "budget: {ratio: 0.5, tokens: 5}"},
            r"Impossible 'budget' of preset file .*mine.yaml: Budget needs",
        ),
        ({"settings": "x: " + "y" * 300_000}, r"mine.yaml is larger than 256 KiB"),
        (
            {"settings": "calibration: /nowhere"},
            r"^Key 'calibration' of preset file .*mine.yaml names no calibration: There is no .* at /nowhere.$",
        ),
        ({"settings": "settings: {"}, r"^Preset file .*mine\.yaml, line 6: expected the node content"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, content, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        read_preset(_write(tmp_path, **content))
    assert "\n" not in str(caught.value)


def test_mistakes_in_a_call_are_named():
    with pytest.raises(
        ValueError, match=r"Unknown method or preset 'chelsea-gpt'; known: adakv, adakv-kvpress, auto, cam, "
    ):
        preset("chelsea-gpt", HALF)
    with pytest.raises(ValueError, match=r"CentroidKV needs a budget and preset 'centroidkv' leaves it open"):
        preset("centroidkv")
    with pytest.raises(ValueError, match=r"Full keeps everything and takes no budget"):
        preset("full", HALF)
    with pytest.raises(ValueError, match=r"Unknown key 'sink' .*allowed: sinks, "):
        preset("chelsea", HALF, sink=3)
