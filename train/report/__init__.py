"""An HTML page of what `train compare` and `train bias` wrote (`train report`): page.py is the command and the page,
read.py reads, plots.py chooses what is drawn, svg.py and axes.py draw, sections.py and report.css write and style.
"""

from .page import main, parser

__all__ = ["main", "parser"]
