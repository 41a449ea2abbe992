"""A clock that stands still until it is told."""


class FakeClock:
    """Stands at ``at``; :meth:`pass_` moves it."""

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self.at = at

    def now(self) -> float:
        """Where it stands."""
        return self.at

    def pass_(self, seconds: float) -> float:
        """Let ``seconds`` go by."""
        self.at += seconds
        return self.at
