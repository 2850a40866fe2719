"""Checkpoints of neural drafters: public formats in, public formats out."""

from .dflash import dflash_layout, save_dflash
from .eagle3 import save_eagle3
from .load import load_dflash, load_eagle3

__all__ = ["dflash_layout", "load_dflash", "load_eagle3", "save_dflash", "save_eagle3"]
