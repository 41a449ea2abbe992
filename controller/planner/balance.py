"""Cut a row of layers into stages of like cost. PURE, exact.

A stage costs the sum of its layers; the last one may count each layer differently (under the
schedule it never recomputes), and a slow device makes its stage cost so many times as much. The cut
makes the costliest stage as cheap as can be; among cuts that are equal in that, stages fill from
the front.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

_Table = tuple[list[list[float]], list[list[int]]]


def cut(
    weights: Sequence[float], last: Sequence[float], depth: int, factors: Sequence[float] = ()
) -> tuple[int, ...]:
    """``depth`` + 1 rising indexes from 0 to the layer count, no stage empty.

    ``weights``: what each layer costs on any stage but the last, ``last``: on the last one;
    ``factors``: per stage, how many times as long its device takes; empty: once.
    Raises ValueError unless 1 <= depth <= layers.
    """
    layers = len(weights)
    if not 1 <= depth <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {depth} stages")
    if depth == 1:
        return (0, layers)
    before = (0.0, *accumulate(weights))
    slowness = factors[-1] if factors else 1.0
    behind = [slowness * cost for cost in (0.0, *accumulate(reversed(last)))]
    costs, splits = _table(before, tuple(factors[:-1])) if factors else _even_table(before)
    level = costs[depth - 1]
    start = min(range(depth - 1, layers), key=lambda at: max(level[at], behind[layers - at]))
    cuts = [layers, start]
    for stages in range(depth - 1, 1, -1):
        cuts.append(splits[stages][cuts[-1]])
    return (*reversed([*cuts, 0]),)


@lru_cache(maxsize=32)
def _even_table(before: tuple[float, ...]) -> _Table:
    """For any depth."""
    return _table(before, (1.0,) * (len(before) - 1))


def _table(before: tuple[float, ...], factors: tuple[float, ...]) -> _Table:
    """``costs[p][i]``: the costliest of ``p`` stages over the first ``i`` layers, cut at best;
    ``splits[p][i]``: where the last of them starts.

    ``before[i]`` is the cost of the first ``i`` layers. The earlier the last stage starts, the
    dearer it is: nobody need look further than where it alone costs as much as the best.
    """
    layers = len(before) - 1
    costs: list[list[float]] = [[], [factors[0] * cost for cost in before]]
    splits: list[list[int]] = [[], [0] * (layers + 1)]
    for stages, factor in enumerate(factors[1:], start=2):
        front = costs[-1]
        row, where = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stages, layers + 1):
            best = float("inf")
            for at in range(end - 1, stages - 2, -1):
                last = factor * (before[end] - before[at])
                if last >= best:
                    break
                if (cost := max(front[at], last)) < best:
                    best, where[end] = cost, at
            row[end] = best
        costs.append(row)
        splits.append(where)
    return costs, splits
