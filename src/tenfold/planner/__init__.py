"""How many sessions fit: the memory of a model on a device, by arithmetic and by the real allocator.

Loads no torch and reads no weights, only configurations and the headers of weight files.
"""

from tenfold.planner.budget import DEFAULT_RESERVE, Pool, pool_on_device
from tenfold.planner.capacity import Capacity, PaddedBlocks, plan_capacity
from tenfold.planner.models import Description, describe, known_names
from tenfold.planner.picture import draw
from tenfold.planner.verify import sessions_admitted

__all__ = [
    "DEFAULT_RESERVE",
    "Capacity",
    "Description",
    "PaddedBlocks",
    "Pool",
    "describe",
    "draw",
    "known_names",
    "plan_capacity",
    "pool_on_device",
    "sessions_admitted",
]
