"""The planner: which layers on which devices, in how many micro-batches.

plan = make_plan(profile, cluster, global_batch_size)
result = search(profile, cluster, global_batch_size)     also the losers and the refused
rows = compare(profile, cluster, global_batch_size)      all planners side by side
"""

from dapple.planner.comparison import Compared, compare
from dapple.planner.contest import Candidate
from dapple.planner.refusal import Refusal
from dapple.planner.search import (
    ANY,
    PLANNERS,
    SearchOptions,
    SearchResult,
    make_plan,
    search,
)

__all__ = [
    "ANY",
    "PLANNERS",
    "Candidate",
    "Compared",
    "Refusal",
    "SearchOptions",
    "SearchResult",
    "compare",
    "make_plan",
    "search",
]
