"""Layers of a prompt, decode steps and experts compiled for an H100 that is not there: launches and copies."""

from pathlib import Path

import pytest

from tests.support.processes import compiled_for_a_gpu


@pytest.fixture(scope="module")
def programs():
    return compiled_for_a_gpu(Path(__file__).with_name("gpu_programs.py"), "gpu_layers")


def test_every_program_has_kernels(programs):
    """Compiled at all, and not what the dispatch falls back to."""
    assert all(program["kernels"] > 0 for program in programs.values()), programs


def test_clustering_works_in_place(programs):
    """Temporaries are one copy of the rows of prompts, which the caller keeps, and small lists: no copy per round. Rows
    of several layers are merged where they were read: no copy at all.
    """
    for cluster in (programs["cluster"], programs["cluster by gravity"]):
        assert cluster["temporary"] <= 1.1 * cluster["arguments"]
    assert programs["cluster two layers"]["temporary"] <= 0.1 * programs["cluster two layers"]["arguments"]


def test_keys_and_scores_come_of_one_product(programs):
    """A product for the scores alone would read all hidden states once more."""
    assert programs["project and score"]["products"] == 3


def test_a_layer_is_put_where_it_is_compressed(programs):
    """Keys and values are read once, with their squares, and no other layer is copied."""
    program = programs["a layer among two"]
    assert program["names"] == ["place_rows_kernel"]
    assert program["temporary"] <= 2**12
    assert program["alias"] >= 2 * 2 * 8 * 65536 * 128 * 2


def test_clustering_of_known_rounds_asks_the_device_nothing(programs):
    """No loop whose end the host would wait for, where a prompt fills its program."""
    assert programs["cluster"]["loops"] == 0


def test_a_question_leaves_the_cache_where_it_lies(programs):
    """Rows of two slots, read and longer in the same launches of a layer: beside them stand parts of attention."""
    program = programs["question"]
    rows = 2 * 8 * 13000 * (2 * 2 * 128 + 4 + 4 + 4)
    assert {"append_rows_kernel", "biased_attention_attend"} <= set(program["names"])
    assert program["alias"] >= rows
    assert program["temporary"] < program["alias"]
    assert program["copied"] <= 2 * 64 * 4096  # no more than hidden states


def test_queries_of_a_question_meet_no_page_of_another_head(programs):
    """A head's pages are one row of slots: for each of them alone the queries would have outputs of a gigabyte."""
    program = programs["question of unequal heads"]
    assert {"paged_attention_attend", "paged_attention_combine"} <= set(program["names"])
    assert program["temporary"] < 5 * program["alias"]
    assert program["launches"] <= programs["question"]["launches"] + 4


def test_layers_are_not_fused_into_each_other(programs):
    """Two are here. Of 32, launches that had results of many layers compiled for a minute."""
    assert programs["decode by scores"]["results"] <= 4


def test_no_weights_of_a_step_become_numbers_in_memory(programs):
    """Layers in int4 and the head in int8: a step allocates less beside them than half of a small matrix in numbers."""
    program, plain = programs["decode of weights in int4"], programs["decode"]
    assert "quantised_linear_kernel" in program["names"]
    assert program["arguments"] < 0.7 * plain["arguments"]  # the table of embeddings and the cache with them
    assert program["temporary"] < plain["temporary"] + 4096 * 1024


def test_decoding_holds_one_cache(programs):
    """The cache is changed where it lies: no step copies it, not even for the clustering that is rarely due.

    Layers whose launches may run side by side cannot share what they need beside it.
    """
    for name in (
        "decode",
        "decode a batch",
        "decode by scores",
        "decode of int8",
        "decode with pages",
        "decode of int4 with pages",
        "decode with recall",
        "decode with windows",
    ):
        assert programs[name]["temporary"] <= programs[name]["alias"] / 2, name


def test_unequal_heads_are_copied_a_layer_at_a_time(programs):
    """In slots for the largest of them: a power of two of rows, with scores beside."""
    row, slots = 2 * 2 * 128 + 4 + 4 + 4, 32768
    assert programs["decode by shares"]["temporary"] <= 1.2 * 8 * slots * row


def test_scores_of_a_step_take_no_launch(programs):
    """They come with queries, keys and values, and enter their slots with the rows."""
    assert programs["decode by scores"]["launches"] <= programs["decode"]["launches"]


def test_heads_of_unequal_budgets_take_no_launch_more(programs):
    """Eight groups in each of two layers: their rows enter, attend and are combined in the launches of one group."""
    assert programs["decode by shares"]["launches"] <= programs["decode by scores"]["launches"] + 2
    names = [name for name in programs["decode by shares"]["names"] if name.startswith("step_in_groups")]
    assert names == ["step_in_groups_attend", "step_in_groups_combine"]


def test_a_product_has_no_question_of_each_head_in_it(programs):
    """Queries, keys and values are one of a hidden state and three weights; the logits' once had all lengths."""
    assert 3 <= programs["decode by shares"]["operands"] <= 4


def test_a_step_takes_few_launches_through_experts(programs):
    """Two, and one for the norms and rotations of queries and keys; none of the router's own, nor for sums."""
    program = programs["decode with experts"]
    assert {"turned_heads_kernel", "expert_products_into", "expert_products_out"} <= set(program["names"])
    assert {"head_products_kernel", "row_products_kernel", "normed_rows_kernel"} <= set(program["names"])
    # Two layers; what a step has beside them is some dozen.
    assert program["launches"] <= 2 * 8 + 16


def test_a_host_store_never_comes_to_the_device(programs):
    """Two layers' rows are on the host at the end, and on the way a step has no room for those of one."""
    if (name := "decode with recall from the host") not in programs:
        pytest.skip("this version of jax cannot describe it")
    program, (heads, rows, dim) = programs[name], (8, 65536 + 384, 128)
    assert program["host"] == 2 * heads * rows * (2 * 2 * dim + 4)
    assert program["temporary"] < heads * rows * 2 * dim


def test_a_step_of_two_devices_sends_hidden_states_alone():
    """A row or two of them for each product. And products they are: of a half of the heads, the compiler would make
    reductions.
    """
    program = compiled_for_a_gpu(Path(__file__).with_name("gpu_mesh_program.py"))
    state, layers = 4096 * 2, 2
    assert sum(kind["bytes"] for kind in program["collectives"]) <= (1 + 2 * layers) * 2 * state
    assert program["reductions"] == 0


def test_experts_of_a_step_are_read_where_they_lie(programs):
    """Qwen3-30B-A3B's, of which a matrix has 3 MB: less than one is allocated, and no loop is needed."""
    for name in ("experts of a token", "experts of a batch"):
        assert programs[name]["temporary"] < 2048 * 768 * 2, name
        assert programs[name]["loops"] == 0, name
    assert programs["decode with experts"]["temporary"] < programs["decode with experts"]["alias"] / 2
    # gpt-oss's, of which a matrix has 17 MB.
    assert programs["experts with biases"]["temporary"] < 2880 * 2880 * 2
    assert programs["experts with biases"]["loops"] == 0
    coded = programs["experts in codes"]
    assert coded["names"] == ["quantised_linear_kernel"]
    assert (coded["loops"], coded["temporary"] < 2**20) == (0, True)
    # A row for each of a token's experts, where a product of every row with every expert would need gigabytes.
    assert programs["experts of a prompt"]["temporary"] <= 2 * 4096 * 8 * 2048 * 2
