"""The user's hand: the ``varuna`` command. It speaks REST and starts local processes; it decides
nothing.
"""
