"""Where engines run: the Ray actor, the pool. The only floor that imports Ray."""
