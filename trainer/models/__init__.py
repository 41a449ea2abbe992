"""Programs that come with us, written as a user writes them: ``builtin:NAME`` is ``NAME.py``."""
