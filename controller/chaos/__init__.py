"""Random trouble for a cluster on this machine, from a seed, and whether the promises held."""
