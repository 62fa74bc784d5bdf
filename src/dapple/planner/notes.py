"""What is said beside a plan, and where there is none."""

from __future__ import annotations

from collections.abc import Iterable

from dapple.planner.layout import Layout
from dapple.planner.paper import FORMULAS, expected_seconds
from dapple.planner.problem import Problem
from dapple.planner.refusal import Refusal


def notes_on(problem: Problem) -> tuple[str, ...]:
    """What the profile does not say and a plan takes for granted."""
    notes = []
    if not problem.memory_is_known:
        notes.append("memory unchecked: the profile has no saved bytes for some layer")
    if len(problem.profile.batch_sizes) == 1:
        notes.append(
            f"times scaled in proportion to the rows from batch size "
            f"{problem.profile.batch_sizes[0]}, the only one in the profile"
        )
    return tuple(notes)


def expected(problem: Problem, layout: Layout, planner: str, seconds: float) -> str:
    """What the paper's formula expects of the plan that it chose, beside the simulated step."""
    formula = expected_seconds(problem, layout, FORMULAS[planner])
    ratio = f", {seconds / formula:.3g}x that" if formula > 0 else ""
    which = "as printed" if planner == "paper" else "with the corrected pivot"
    return (
        f"chosen by the paper's formula {which}, which expects {formula:.4g} s and splits rows "
        f"evenly, whole or not; the simulated step takes {seconds:.4g} s{ratio}"
    )


def nothing_fits(refusals: Iterable[Refusal]) -> str:
    """The message of an error: which layout came closest."""
    closest = min(refusals, key=lambda refusal: refusal.excess, default=None)
    if closest is None:
        return "no plan fits the devices' memory; take devices with more, or more of them"
    return f"no plan fits the devices' memory; the closest: {closest}"
