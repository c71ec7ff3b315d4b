"""Where the examples of a batch are in an activation: in a dimension of their own, or flattened with something else.

Networks move them. GPT-2 flattens ``(B, T, features)`` to ``(B * T, features)``, Swin cuts images into windows
``(B * windows, ...)``, time-first networks work on ``(T, B, features)``. The shape alone does not tell: T may equal B.
So every operation of a network is followed from its inputs on. What an operation does to the examples is known for
those that move dimensions; all others keep a dimension where it is, or lead to an activation of unknown layout.
"""

from bilevel.layouts.follow import Layouts, following
from bilevel.layouts.layout import FIRST, Ids, Layout

__all__ = ["FIRST", "Ids", "Layout", "Layouts", "following"]
