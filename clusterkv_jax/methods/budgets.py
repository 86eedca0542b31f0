"""How many rows each head may keep of a prompt, and which budgets are impossible."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clusterkv_jax.budget import Budget, rows_for, share_table
from clusterkv_jax.methods.request import RequestShape, all_heads
from clusterkv_jax.runtime.errors import counted


def head_rows(budget: Budget, lengths: np.ndarray, layer: int, request: RequestShape, fewest: int = 0) -> np.ndarray:
    """B of each prompt and KV head of a layer by its shares, i64 [lengths, K], none below `fewest` (see `Budget`)."""
    if budget.shares is None:
        first, of = [0], None
    else:
        shares = share_table(budget, request.num_layers, request.num_kv_heads)[layer]
        first, of = np.unique(shares, return_index=True, return_inverse=True)[1:]
    columns = [
        rows_for(
            budget,
            lengths,
            request.max_new_tokens,
            bytes_per_row=request.bytes_per_row,
            layer=layer,
            head=int(head),
            num_layers=request.num_layers,
            num_heads=request.num_kv_heads,
            fewest=fewest,
        )
        for head in first
    ]
    return all_heads(columns[0], request.num_kv_heads) if len(columns) == 1 else np.stack(columns, axis=1)[:, of]


def check_budgets(
    method: Any, lengths: np.ndarray, request: RequestShape, budget_rows: Callable[..., np.ndarray]
) -> None:
    """Raise ValueError if a prompt that is or will be compressed has no room beside its protected rows, by these
    budgets: `budget_rows(lengths, layer, request)`.
    """
    if not lengths.size:  # a server asks for each request, and short prompts are kept whole
        return
    schedule, protected = method.schedule, method.protected
    for layer in range(request.num_layers):
        rows = budget_rows(lengths, layer, request)
        returns = np.zeros(rows.shape, bool)
        if schedule.kind != "append" and method.forgets:
            beyond = schedule.interval if schedule.kind == "interval" else 1
            returns = lengths[:, None] + request.reserve >= rows + beyond
        impossible = ((rows < lengths[:, None]) | returns) & (rows < protected.fewest)
        if impossible.any():
            at, head = np.argwhere(impossible)[0]
            raise ValueError(
                f"{type(method).__name__}: a prompt of {counted(lengths[at], 'token')} has a budget of "
                f"{counted(max(0, rows[at, head]), 'row')}, which must be more than {protected}."
            )
