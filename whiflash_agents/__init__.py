"""WhiFlash Agents: speculative decoding for people who run agents.

Importing this package loads neither torch, nor transformers, nor ray; names resolve on first use.
"""

__version__ = "0.1.0"
