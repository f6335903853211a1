"""From a raw log of interactions to prepared sequences, and batches of them."""
