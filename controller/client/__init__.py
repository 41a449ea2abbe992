"""What a user does with a controller, without the commands: ask its REST API, pack and send a job,
start a cluster on this machine. The verbs, the chaos and the benches stand above it; it knows none
of them.
"""
