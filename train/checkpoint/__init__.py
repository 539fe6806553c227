"""Checkpoints, bit for bit: state.py takes a training's state out of its model and optimisers and puts it back,
store.py writes and reads folders of it, tensor_files.py is their format, durable.py their files on the disk.
"""

from .state import State, gather, restore
from .store import found, latest, load, save

__all__ = ["State", "found", "gather", "latest", "load", "restore", "save"]
