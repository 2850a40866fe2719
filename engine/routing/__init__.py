"""Routers: who drafts the next round of each sequence. One file each, behind `base.py`."""
