"""The agent: one daemon per VM that starts, watches and ends trainers as the controller orders.

It knows how a trainer is started and what it says; it owns the wire (:mod:`agent.wire`). It never
decides what should run, never relaunches by itself, and never lets a trainer outlive it.
"""
