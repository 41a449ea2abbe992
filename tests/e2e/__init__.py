"""As a user runs it: a real controller, real agents, real trainers on this machine."""
