"""PURE. Which shape is best: depth x replicas, the cuts between stages, and why."""
