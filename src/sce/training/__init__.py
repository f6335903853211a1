"""Training: `fit` in loop.py, and around it the run on disk, checkpoints and measurements."""
