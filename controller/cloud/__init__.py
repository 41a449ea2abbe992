"""Whoever gives machines: the door is port.py; behind it local agents, later Azure and SSH."""
