"""Small helpers that know nothing of agents, models or training."""
