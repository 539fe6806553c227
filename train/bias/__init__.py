"""The bias experiment (`train bias`): command.py runs it, measure.py takes the gradients, statistics.py splits their
errors into noise and bias, table.py makes the document and its text.
"""

from .command import main, parser

__all__ = ["main", "parser"]
