"""Plans: arithmetic, collectives of a program's text, tables, JSON and errors; nothing is compiled for a TPU here."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from typer.testing import CliRunner

import clusterkv_jax as ckv
from clusterkv_jax import cli
from clusterkv_jax.cli.plan import show
from clusterkv_jax.evaluation.report.plots import as_svg, new_figure
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.planning import arithmetic, collectives, compile_stats, process
from clusterkv_jax.planning.abstract_request import ProgramJob, chip_bytes
from clusterkv_jax.planning.plan_types import Measures, MeshLayout, PlanRequest, Sample
from clusterkv_jax.planning.report import notes, plan, verdict
from clusterkv_jax.planning.shapes import model_config
from clusterkv_jax.planning.topology import GIB, choose_mesh, model_ways, parse_topology
from clusterkv_jax.runtime.sharding import named_mesh

ROOT = Path(__file__).parent.parent
ASKED = PlanRequest("llama-3.1-70b", "centroidkv", 0.2, 1024, 2, 64, "v5e:4x4", None)
V5E = parse_topology("v5e:4x4")
# 1 GiB of weights; a cache of 1 GiB at 1,024 tokens, 0.5 at half; temporaries of prefill of 2 GiB, 1 at half.
MEASURES = Measures(
    mesh={"data": 2, "sequence": 1, "model": 8},
    groups=2,
    batch_ways=2,
    batch=2,
    context=1024,
    positions=8192,
    layers=80,
    compiled_layers=(2, 4),
    weights=GIB,
    step_reads=0.819e9,
    hidden=GIB / 4,
    cache=(Sample(1024, GIB), Sample(512, GIB / 2)),
    prefill=(Sample(1024, 2 * GIB), Sample(512, GIB)),
    decode=GIB / 2,
    programs=GIB / 4,
    full_cache=5 * GIB,
    by_ratio=(Sample(0.2, GIB), Sample(0.1, GIB / 2)),
    collectives=(collectives.Collective("all-reduce", 160, 2e6),),
    whole=(),
    layouts=(
        MeshLayout(1, 1, 8 * GIB, 16 * GIB, GIB / 2),
        MeshLayout(1, 8, GIB, 2 * GIB, GIB / 2),
        MeshLayout(2, 8, GIB, GIB, GIB / 4),
    ),
)


def _run(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def _asked(**changes):
    options = {"model": "llama-3.1-8b", "context": 4096, "topology": "v5e:2x4"} | changes
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture
def answers(monkeypatch):
    """The command's worker answers without compiling; what it was asked."""
    asked = []

    def ask(question, seconds, progress):
        asked.append(question)
        return MEASURES

    monkeypatch.setattr(process, "ask", ask)
    return asked


def test_a_chip_holds_all_groups_and_the_larger_of_the_temporaries():
    memory = arithmetic.memory(MEASURES)
    assert memory.total == (1 + 1 + 0.25 + 2) * GIB
    assert replace(memory, decode=3 * GIB).total == (1 + 1 + 0.25 + 3) * GIB
    for group in ("weights", "cache", "programs", "prefill"):
        assert replace(memory, **{group: 0.0}).total < memory.total, group


def test_memory_of_another_batch_and_context():
    assert arithmetic.memory(MEASURES, batch=4).cache == 2 * GIB
    assert arithmetic.memory(MEASURES, batch=4).prefill == 4 * GIB
    assert arithmetic.memory(MEASURES, context=3072).cache == 3 * GIB
    # Three sequences cannot be divided by two groups: every chip holds all of them.
    assert arithmetic.memory(MEASURES, batch=3).cache == 3 * GIB


def test_limits_are_the_last_that_fit():
    chip = V5E.chip
    batch, context = arithmetic.largest_batch(MEASURES, chip), arithmetic.longest_context(MEASURES, chip)
    assert (batch, context) == (8, 4864)
    for limit, step, name in ((batch, 2, "batch"), (context, 128, "context")):
        assert arithmetic.memory(MEASURES, **{name: limit}).total <= chip.hbm
        assert arithmetic.memory(MEASURES, **{name: limit + step}).total > chip.hbm
    assert arithmetic.largest_ratio(MEASURES, chip) == 1.0
    assert arithmetic.largest_ratio(MEASURES, replace(chip, hbm=4 * GIB)) == 0.15
    assert arithmetic.longest_context(MEASURES, replace(chip, hbm=100 * GIB)) == MEASURES.positions


def test_limits_where_nothing_fits():
    chip = replace(V5E.chip, hbm=GIB / 2)
    assert arithmetic.remedies(MEASURES, chip) == arithmetic.Remedies(0, 0, None, None)
    found = plan(ASKED, MEASURES, replace(V5E, chip=chip))
    assert verdict(found).endswith("lacks 3.75 GiB. No batch, context, ratio or number of chips alone would fit.")


def test_the_fewest_chips_are_found_by_shapes():
    layout = arithmetic.smallest_layout(MEASURES, V5E.chip)
    assert layout == MEASURES.layouts[1]
    assert arithmetic.smallest_layout(MEASURES, replace(V5E.chip, hbm=5 * GIB)) == MEASURES.layouts[2]
    assert arithmetic.smallest_layout(MEASURES, replace(V5E.chip, hbm=50 * GIB)) == MEASURES.layouts[0]


def test_the_least_time_is_what_is_read_and_what_is_sent():
    floor = arithmetic.roofline(MEASURES, V5E.chip)
    assert floor.read_ms == pytest.approx(1.0)
    assert floor.sent_ms == pytest.approx(0.01)
    assert floor.total_ms == floor.read_ms + floor.sent_ms


def test_collectives_of_all_layers_follow_the_line():
    few, more = (collectives.Collective("all-reduce", 4 + 2 * n, 100.0 * n) for n in (2, 4))
    gather = collectives.Collective("all-gather", 1, 8.0)
    found = arithmetic.of_all_layers([few, gather], [more, gather], (2, 4, 80))
    assert found == (collectives.Collective("all-reduce", 164, 8000.0), gather)


PROGRAM = """HloModule jit_decode_loop

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%late (p: (s32[])) -> (s32[]) {
  ROOT %gathered = bf16[8,128]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%inner (p: bf16[2,64]) -> bf16[2,64] {
  %all-reduce.7 = bf16[2,64]{1,0:T(2,128)(2,1)S(1)} all-reduce(%p), replica_groups=mesh['x'=2,'y'=4] {'y'}
}

%body (p: (s32[])) -> (s32[]) {
  %fused = bf16[2,64] fusion(%p), kind=kLoop, calls=%inner
  %all-reduce.1 = (f32[4]{0:T(128)}, s32[4]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
  %alone = f32[99]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
  %started = (bf16[16], bf16[64]) all-gather-start(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %done = bf16[64] all-gather-done(%started)
  %compressed = (s32[]) conditional(%due, %p, %p), branch_computations={%late, %late}
  ROOT %next = (s32[]) tuple(%fused)
}

%running (p: (s32[])) -> pred[] {
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (p: s32[]) -> s32[] {
  %before = f32[1000]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %loop = (s32[]) while(%p), condition=%running, body=%body
}
"""


def test_collectives_of_a_step_are_those_of_the_loop_without_compression():
    found = {one.kind: one for one in collectives.per_step(PROGRAM, 8)}
    assert found.keys() == {"all-reduce", "all-gather"}
    assert found["all-reduce"].count == 2
    assert found["all-reduce"].bytes == 2 * 3 / 4 * (2 * 64 * 2) + 2 * 3 / 4 * (4 * 4 + 4 * 4)
    assert found["all-gather"] == collectives.Collective("all-gather", 1, 3 / 4 * 64 * 2)


@pytest.mark.parametrize(
    ("kind", "bytes"),
    [
        ("all-reduce", 1500),
        ("all-gather", 750),
        ("reduce-scatter", 3000),
        ("all-to-all", 750),
        ("collective-permute", 1000),
    ],
)
def test_bytes_that_a_chip_sends(kind, bytes):
    assert collectives.sent(kind, 1000, 4) == bytes


def test_topologies():
    assert [parse_topology(text).count for text in ("v5e:4x4", "v5p:2x2x2", "h200:8", "v6e:1x1")] == [16, 8, 8, 1]


def test_a_model_is_split_over_as_many_chips_as_its_heads_allow():
    config = model_config("llama-3.1-70b")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.dtype) == (80, 64, 8, "bfloat16")
    assert [model_ways(config, count, 2) for count in (1, 6, 8, 16, 12)] == [1, 2, 8, 8, 4]
    assert choose_mesh(config, 16, 2, None) == ({"data": 2, "sequence": 1, "model": 8}, "data=2,model=8")
    # One sequence: all chips share it, two of them the slots of a head.
    assert choose_mesh(config, 16, 1, None)[1] == "model=16"
    assert choose_mesh(config, 16, 1, "data=4,model=4")[0]["model"] == 4


def test_a_folder_with_its_configuration_alone_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="vocab_size"):
        model_config(str(tmp_path))
    published = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    published |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert model_config(str(tmp_path)).num_layers == 3


def test_json_is_one_object_and_holds_every_number(answers):
    result = _run(*_asked(method="centroidkv", cache_ratio=0.2, batch=2), "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["hbm"]["total"] == sum(
        found["hbm"][name] for name in ("weights", "cache", "programs", "prefill_temporaries")
    )
    assert found["fits"]
    assert found["spare"] == found["hbm"]["capacity"] - found["hbm"]["total"]
    assert found["collectives"] == [{"kind": "all-reduce", "count": 160, "bytes": 2000000}]
    assert found["fewest_chips"] == {"chips": 8, "mesh": "model=8"}
    assert {"largest_batch", "longest_context", "largest_ratio", "roofline", "notes", "seconds"} <= found.keys()
    assert answers == [PlanRequest("llama-3.1-8b", "centroidkv", 0.2, 4096, 2, 512, "v5e:2x4", None)]


def test_tables_show_memory_limits_and_a_step(answers):
    result = _run(*_asked(method="centroidkv", cache_ratio=0.2))
    assert result.exit_code == 0, result.stderr
    for part in (
        "cache, 20.0% of the full one",
        "4.25",
        "15.75",
        "It fits, with 11.50 GiB",
        "all-reduce",
        "160",
        "2,000",
    ):
        assert part in result.stdout
    for part in ("batch", "4,864", "8 as model=8", "1.010"):
        assert part in result.stdout


def test_what_does_not_fit_says_by_how_much_and_what_would():
    chip = replace(V5E.chip, hbm=4 * GIB)
    found = plan(ASKED, MEASURES, replace(V5E, chip=chip))
    assert not found["fits"]
    assert verdict(found) == (
        "It does not fit: each chip lacks 0.25 GiB. Any of these alone would fit: a context of 896 or "
        "a cache ratio of 0.15."
    )


def test_notes_say_what_the_numbers_rest_on():
    text = " ".join(notes(ASKED, MEASURES, V5E))
    assert "The mesh is data=2,model=8, by the heads" in text
    assert "2 and 4 layers were compiled; 80 follow the line" in text
    whole = " ".join(notes(ASKED, replace(MEASURES, compiled_layers=(80,)), V5E))
    assert "The decode program of all 80 layers was compiled." in whole
    alone = replace(MEASURES, batch=1, batch_ways=1, whole=("kv_heads",), compiled_layers=())
    text = " ".join(notes(replace(ASKED, batch=1), alone, V5E))
    assert "A batch of 1 is not divided by 2" in text
    assert "does not divide kv_heads" in text
    assert "Temporaries are estimated" in text
    assert "surrogate" not in text
    assert "auto is planned with a linear surrogate" in " ".join(
        notes(replace(ASKED, method="auto"), replace(MEASURES, learned=True), V5E)
    )


def test_where_the_compiler_refuses_all_layers_few_say_what_they_would_take(monkeypatch):
    """What it refuses is said, another error is not taken for it."""
    job = ProgramJob(model_config("demo"), ckv.Full(), named_mesh("model=1", jax.devices()[:1]), 1, 512, 32)
    full, said, refusals = "RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 18G of 15G hbm.", [], []

    def decode(self, count):
        if count == self.config.num_layers:
            raise jax.errors.JaxRuntimeError(full)
        return decoded(self, count)

    decoded = ProgramJob.decode
    monkeypatch.setattr(ProgramJob, "decode", decode)
    found = compile_stats.decode_measures(job, V5E, said.append, refusals)
    assert found["compiled_layers"] == (2, 4)
    assert refusals == ["The compiler refuses decoding 1 x 512 tokens: Ran out of memory in hbm."]
    assert [line.split(" for ")[0] for line in said] == [
        "compiling decode of all 6 layers",
        "compiling decode of 2 layers",
        "compiling decode of 4 layers",
    ]
    full = "INTERNAL: a fault"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a fault"):
        compile_stats.decode_measures(job, V5E, said.append, refusals)


def test_other_meshes_hold_the_surrogate_too():
    """The mesh of the plan is one of those that are listed, and holds there what it holds here."""
    method, mesh = ckv.OrbitKV(ckv.Budget(ratio=0.25)), named_mesh("model=2", jax.devices()[:2])
    job = ProgramJob(model_config("demo"), method, mesh, 1, 512, 32)
    assert all("surrogate" in layer for layer in job.params["layers"])
    same = next(x for x in compile_stats.layouts(job) if (x.data, x.model) == (1, 2))
    assert same.weights == chip_bytes(job.params)
    assert same.cache == chip_bytes((job.cache.layers, job.cache.state))


def test_a_step_reads_as_much_whether_a_gate_has_read_the_prompt():
    """The cache has the same slots, though layers are read by plans of their own."""
    method, mesh = ckv.CentroidKV(ckv.Budget(ratio=0.25)), named_mesh("model=1", jax.devices()[:1])
    whole = ProgramJob(model_config("demo"), method, mesh, 1, 512, 32)
    read = replace(whole, gate=Gate(window=128, chunk=128))
    assert read.reading_bytes
    assert compile_stats.step_reads(read, 1, 1) == compile_stats.step_reads(whole, 1, 1)


def test_rows_that_wait_on_a_gpu_are_counted():
    """A GPU compresses the demo model's layers at once, so that all but the last one's rows lie there meanwhile."""
    config, budget = model_config("demo"), ckv.Budget(ratio=0.25)
    numbers = config.head_dim * jnp.dtype(config.dtype).itemsize + 4  # of a row, and its square
    rows = 2 * 512 * config.num_kv_heads * numbers + 4  # and a length

    def estimated(method, devices):
        mesh = named_mesh(f"model={devices}", jax.devices()[:devices])
        return compile_stats.estimated(ProgramJob(config, method, mesh, 1, 512, 32))

    clustered, full = (estimated(method, 1) for method in (ckv.CentroidKV(budget), ckv.Full()))
    assert clustered - full == (config.num_layers - 1) * rows
    assert estimated(ckv.CentroidKV(budget), 2) == estimated(ckv.Full(), 2)


def test_a_picture_shows_the_full_cache_beside(answers, tmp_path):
    file = tmp_path / "memory.png"
    result = _run(*_asked(method="centroidkv", cache_ratio=0.2), "--plot", file)
    assert result.exit_code == 0, result.stderr
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [question.method for question in answers] == ["centroidkv", "full"]


def test_a_picture_that_cannot_be_drawn_is_left_out(answers, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = _run(*_asked(method="centroidkv", cache_ratio=0.2), "--plot", tmp_path / "memory.png")
    assert result.exit_code == 0, result.stderr
    assert "No picture is drawn. Drawing the plan needs the package 'matplotlib'" in result.stderr
    assert [question.method for question in answers] == ["centroidkv"]


def test_a_name_in_a_picture_is_no_formula():
    figure, axes = new_figure(2, 2)
    axes.set_title(r"$\badcmd$")
    assert "<svg" in as_svg(figure)


def test_the_guide_shows_what_the_command_prints():
    """Its example is the printed form of a plan that was compiled."""
    found = json.loads((ROOT / "tests" / "golden" / "plan_llama_70b_v5e_4x4.json").read_text())
    console = Console(width=100, record=True, file=io.StringIO())
    show(found, console)
    printed = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    assert f"```text\n{printed}\n```" in (ROOT / "docs" / "guides" / "plan.md").read_text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topology": "v9:2x2"}, "--topology 'v9:2x2' is unknown; allowed are v5e, v5p, v6e, h100, h200"),
        ({"topology": "v5e:8"}, "--topology 'v5e:8' is unknown"),
        ({"topology": "h200:2x2"}, "--topology 'h200:2x2' is unknown"),
        (
            {"model": "llama-9"},
            "There is no folder 'llama-9'; allowed: 'demo', gpt-oss-20b, llama-3.1-70b, llama-3.1-8b, qwen3-30b-a3b",
        ),
        ({"method": "best"}, "Unknown method or preset 'best'"),
        ({"method": "snapkv"}, "--method snapkv needs --cache-ratio."),
        ({"cache_ratio": "0.5"}, "--method full keeps the whole cache and takes no --cache-ratio."),
        ({"mesh": "model=3"}, "--mesh model=3 is for 3 chips, and the topology has 8."),
        ({"mesh": "rows=8"}, "A mesh is such as data=2,model=4"),
        ({"context": "200000"}, "--context 200000 exceeds the model's 131072 positions."),
        ({"plot": "memory.pdf"}, "--plot must be a .png file, got memory.pdf."),
    ],
)
def test_mistakes_are_one_sentence(changes, sentence):
    result = _run(*_asked(**changes))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {sentence}")
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    result = _run(*_asked())
    assert result.exit_code == 2
    assert "pip install 'clusterkv-jax[plan]'" in result.stderr


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import time; time.sleep(60)", "took longer than 1 s; a larger"),
        ("import sys; sys.exit('the compiler has died')", "ended without a result: the compiler has died"),
        (
            "import sys; sys.exit('F1123 07:43 17 layout.cc:1] Check failed: x > 0\\nE1 abort')",
            "result: Check failed: x > 0",
        ),
        ('print(\'{"error": "It is too large."}\')', "It is too large"),
    ],
)
def test_a_worker_that_fails_is_one_sentence(monkeypatch, code, sentence):
    monkeypatch.setattr(process, "WORKER", ("-c", code))
    with pytest.raises(ValueError, match=sentence):
        process.ask(replace(ASKED, topology="h200:8"), 1 if "sleep" in code else 60, lambda doing: None)
