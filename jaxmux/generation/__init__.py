"""Generation of text with the backbone and with adapters of all kinds, side by side in one batch.

`Generator` reads all prompts of a batch at once into a cache of keys and values, and then writes
one token of every sequence in each step. `complete` and `stream` make a generator for one call.
"""

from .chat import Conversation, end_of_turn
from .generator import Generator, complete
from .requests import Request
from .sampling import Sampling
from .text_stream import Piece

__all__ = ["Conversation", "Generator", "Piece", "Request", "Sampling", "complete", "end_of_turn"]
