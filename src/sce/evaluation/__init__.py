"""Ranking the whole catalogue, and how good a ranking is."""
