"""The controller: it alone decides what should run, from facts that were reported and are durable
in its store.
"""
