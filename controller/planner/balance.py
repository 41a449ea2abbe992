"""Cut a row of layers into stages of like cost. PURE, exact.

A stage costs the sum of its layers; the last one may count each layer differently (under the
schedule it never recomputes). The cut makes the costliest stage as cheap as can be; among cuts that
are equal in that, stages fill from the front.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def cut(weights: Sequence[float], last: Sequence[float], depth: int) -> tuple[int, ...]:
    """``depth`` + 1 rising indexes from 0 to the layer count, no stage empty.

    ``weights``: what each layer costs on any stage but the last, ``last``: on the last one.
    Raises ValueError unless 1 <= depth <= layers.
    """
    layers = len(weights)
    if not 1 <= depth <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {depth} stages")
    if depth == 1:
        return (0, layers)
    before = [0.0, *accumulate(weights)]
    behind = [0.0, *accumulate(reversed(last))]
    costs, splits = _table(tuple(before))
    level = costs[depth - 1]
    start = min(range(depth - 1, layers), key=lambda at: max(level[at], behind[layers - at]))
    cuts = [layers, start]
    for stages in range(depth - 1, 1, -1):
        cuts.append(splits[stages][cuts[-1]])
    return (*reversed([*cuts, 0]),)


@lru_cache(maxsize=32)
def _table(before: tuple[float, ...]) -> tuple[list[list[float]], list[list[int]]]:
    """``costs[p][i]``: the costliest of ``p`` stages over the first ``i`` layers, cut at best;
    ``splits[p][i]``: where the last of them starts.

    ``before[i]`` is the cost of the first ``i`` layers. A later split makes the front dearer and
    the last stage cheaper, so the best one is found where the two cross.
    """
    layers = len(before) - 1
    costs: list[list[float]] = [[], list(before)]
    splits: list[list[int]] = [[], [0] * (layers + 1)]
    for stages in range(2, layers + 1):
        front = costs[-1]
        row, where = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stages, layers + 1):
            low, high = stages - 1, end - 1
            while low < high:
                middle = (low + high) // 2
                if front[middle] >= before[end] - before[middle]:
                    high = middle
                else:
                    low = middle + 1
            candidates = (low, low - 1) if low > stages - 1 else (low,)
            where[end] = min(candidates, key=lambda at: max(front[at], before[end] - before[at]))
            row[end] = max(front[where[end]], before[end] - before[where[end]])
        costs.append(row)
        splits.append(where)
    return costs, splits
