"""Verifiers, scores, reward functions in worker processes, and tracing of gold answers."""
