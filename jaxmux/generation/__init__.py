"""Generation of text with the backbone and with adapters of all kinds, side by side in one batch.

`Generator` reads prompts into the rows of a cache of keys and values. Each step writes one token of
every sequence. When a sequence ends, its row is given to the next prompt.
"""

from .chat import Conversation, end_of_turn
from .generator import Generator, Piece, complete
from .requests import Request
from .sampling import Sampling

__all__ = ["Conversation", "Generator", "Piece", "Request", "Sampling", "complete", "end_of_turn"]
