"""The pure core: memory decisions and scheduling as data in, data out.

Standard library only: no tensors, clock, threads, environment or logging. Everything that happens enters as a call
(``submit``, ``cancel``, ``plan``, ``commit``) and leaves as a plan or as events, so that the same code serves,
simulates and plans capacity.
"""

from tenfold.core.cache import Cache
from tenfold.core.plan import Copy, Entry, Rewrite, StepOutcome, StepPlan, TokenLogprobs, Work
from tenfold.core.policy import FirstComeFirstServed, Policy
from tenfold.core.scheduler import Scheduler
from tenfold.core.sequence import Sequence
from tenfold.core.spec import AttentionLayer, CacheSpec, ModelSpec, RecurrentLayer
from tenfold.core.types import FinishReason, Request, SamplingParams, TokenEvent

__all__ = [
    "AttentionLayer",
    "Cache",
    "CacheSpec",
    "Copy",
    "Entry",
    "FinishReason",
    "FirstComeFirstServed",
    "ModelSpec",
    "Policy",
    "RecurrentLayer",
    "Request",
    "Rewrite",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "StepOutcome",
    "StepPlan",
    "TokenEvent",
    "TokenLogprobs",
    "Work",
]
