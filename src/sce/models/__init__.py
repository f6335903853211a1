"""Models that turn histories into states, and know no loss."""
