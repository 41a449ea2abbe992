"""Thin HTTP: parse, one call, answer. Decides nothing."""
