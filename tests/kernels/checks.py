"""The checks that every backend of an op goes through: on a CPU in test_kernels, on a GPU in benchmark_kernels.py.

`check(implementation, examples=n)` draws n cases for each shape, and every shape compiles.
"""

from tests.kernels import base
from tests.kernels import base_kmeans as kmeans_base
from tests.kernels import base_merge as merge_base
from tests.kernels import base_recall as recall_base

CHECKS = {
    "biased_attention": [base.check_attention],
    "accumulated_attention": [base.check_accumulated],
    "chunked_matching": [base.check_matching, base.check_paired],
    "row_merge": [merge_base.check_row_merge],
    "kmeans": [kmeans_base.check_kmeans],
    "kmeans on Hopper": [kmeans_base.check_kmeans_on_hopper],
    "append_rows": [base.check_append],
    "group_rows": [recall_base.check_group],
    "gather_rows": [recall_base.check_gather],
    "index_scores": [recall_base.check_index_scores],
    "select_rows": [recall_base.check_select],
    "recalled_attention": [recall_base.check_recalled],
}
