"""Trains decoder language models with FP8 attention; ``python -m train --help``."""
