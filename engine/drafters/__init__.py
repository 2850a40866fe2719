"""Drafters: one file each, all behind the `Drafter` protocol of `base.py`."""
