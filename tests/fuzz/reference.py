"""The methods once more, in plain NumPy and float64, one head at a time: what the library is compared with.

A score says what rows are worth; `best` rows are those that no other row beats by more than rounding could explain.
Merging depends on its decisions one after the other: `merged` also says how close the closest of them was.
"""

from collections.abc import Iterator

import numpy as np

ROUNDING = 1e-4


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, degree: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(D) + log degree) v of one query [D] over the rows [C, D] whose degree is not 0."""
    there = degree > 0
    keys, values = keys[there].astype(np.float64), values[there].astype(np.float64)
    return softmax(keys @ query.astype(np.float64) / np.sqrt(len(query)) + np.log(degree[there])) @ values


def probabilities(queries: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
    """Causal attention [G, T, N] of queries [G, T, D] at the positions `first`, `first` + 1, ..."""
    scores = queries @ keys.T / np.sqrt(keys.shape[-1])
    later = np.arange(len(keys)) > first + np.arange(queries.shape[1])[:, None]
    return softmax(np.where(later, -np.inf, scores))


def snapkv(queries: np.ndarray, keys: np.ndarray, window: int, kernel: int) -> np.ndarray:
    """What the last `window` queries [G, N, D] look at, the maximum over neighbours, of the rows before them."""
    n = len(keys)
    mean = probabilities(queries[:, n - window :], keys, n - window)[..., : n - window].mean((0, 1))
    half = kernel // 2
    return np.asarray([mean[max(0, i - half) : i + half + 1].max() for i in range(n - window)])


def h2o(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What all queries [G, N, D] look at, in sum."""
    return probabilities(queries, keys, 0).mean(0).sum(0)


def quest(query: np.ndarray, keys: np.ndarray, page: int) -> np.ndarray:
    """A page's score: the most that any key between its bounds could have with the query."""
    pages = [keys[i : i + page] for i in range(0, len(keys), page)]
    return np.asarray([np.maximum(query * rows.min(0), query * rows.max(0)).sum() for rows in pages])


def chosen_pages(scores: np.ndarray, tokens: int, budget: int, page: int, least: int) -> Iterator[set[int]]:
    """The rows that may be attended to: of the newest page and of the best ones before it; all, if there is room."""
    if tokens <= budget:
        yield set(range(tokens))
        return
    count = max(budget // page, least) - 1
    order = np.argsort(-scores[:-1], kind="stable")[:count]
    yield {row for i in (*order, len(scores) - 1) for row in range(i * page, min(tokens, (i + 1) * page))}


def are_best(chosen: np.ndarray, scores: np.ndarray) -> bool:
    """Whether no row that was left out is worth more than one that was chosen."""
    left = np.delete(scores, chosen)
    scale = np.abs(scores).max(initial=1e-30)
    return not len(chosen) or not len(left) or scores[chosen].min() >= left.max() - ROUNDING * scale


def merged(
    keys: np.ndarray, values: np.ndarray, budget: int, sinks: int, recent: int, chunk: int, share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """CentroidKV: keys, values and degrees after rounds down to the budget, and the closest decision."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    degree, gap = np.ones(len(keys)), np.inf
    while len(keys) > budget:
        edges, closest = _edges(keys[sinks : len(keys) - recent], chunk)
        count = max(1, min(int(share * len(edges)), len(keys) - budget))
        order = sorted(edges, key=lambda edge: (-edge[0], edge[1]))
        gap = min(gap, closest, *([order[count - 1][0] - order[count][0]] if count < len(order) else []))
        taken = np.zeros(len(keys), bool)
        weighted = [keys * degree[:, None], values * degree[:, None], degree[:, None].copy()]
        for _, a, b in order[:count]:
            taken[sinks + a] = True
            for x in weighted:
                x[sinks + b] += x[sinks + a]
        degree = weighted[2][~taken, 0]
        keys, values = (x[~taken] / degree[:, None] for x in weighted[:2])
    return keys, values, degree, gap


def _edges(rows: np.ndarray, chunk: int) -> tuple[list[tuple[float, int, int]], float]:
    """(cosine, a, b) of every even row of a chunk with the best odd one, and how close the second best comes."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
    edges, closest = [], np.inf
    for start in range(0, len(rows), chunk):
        part = unit[start : start + chunk]
        cosines = part[0::2] @ part[1::2].T
        for i, row in enumerate(cosines):
            if len(row):
                best = int(np.argmax(row))
                edges.append((float(row[best]), start + 2 * i, start + 2 * best + 1))
                closest = min(closest, *(row[best] - np.delete(row, best)), np.inf)
    return edges, float(closest)
