"""Helpers that import no other package of memrl."""
