"""Which samples a step takes: a pure function of (seed, step), and the hash by which a ledger
proves it. PURE.

Position p (from 0, over all epochs) lies in epoch p // n at place p % n; the epoch's order is a
permutation of the n samples computed place by place (no table), so any rank can ask for any
position. Step s (from 1) takes positions (s-1)*M .. s*M-1. Nothing of depth, replicas or micro-
batch is in it.
"""


def sample_at(position: int, samples: int, seed: int) -> int:
    """The sample id (0 .. ``samples`` - 1) at global ``position``; each epoch is a permutation of
    its own.
    """
    epoch, place = divmod(position, samples)
    return _permute(place, samples, _mix64(_mix64(seed & _M64) ^ _mix64(epoch + 1)))


def positions_of(step: int, batch_size: int) -> range:
    """The global positions that step ``step`` (from 1) takes."""
    return range((step - 1) * batch_size, step * batch_size)


def mix32(sample_id: int) -> int:
    """32 well mixed bits of a number."""
    return _mix64(sample_id + 0x9E3779B97F4A7C15) & 0xFFFFFFFF


def hash_of(sample_ids_sum: int) -> str:
    """The sum of :func:`mix32` over a step's samples, as it is reported: eight hex digits."""
    return f"{sample_ids_sum & 0xFFFFFFFF:08x}"


def expected_hash(step: int, batch_size: int, samples: int, seed: int) -> str:
    """What step ``step`` must report when each of its samples was consumed exactly once."""
    ids = (sample_at(p, samples, seed) for p in positions_of(step, batch_size))
    return hash_of(sum(mix32(i) for i in ids))


_M64 = (1 << 64) - 1


def _mix64(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers."""
    x &= _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _permute(place: int, samples: int, key: int) -> int:
    """A four-round Feistel network over the next even number of bits, walked until it lands below
    ``samples``.
    """
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(4):
            left, right = right, left ^ (_mix64(key ^ (right << 3) ^ round_) & mask)
        place = left << half | right
        if place < samples:
            return place
