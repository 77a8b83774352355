"""Leaving steps out of a plan for as long as it still fails."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from tests.simulation.plan import Change, Plan, Step
from tests.simulation.run import Result, run_plan

Planting = Callable[[], AbstractContextManager[object]]


def shrink(result: Result, bug: Planting = nullcontext, runs_max: int = 200) -> Result:
    """The smallest failing plan that was found in *runs_max* runs, and its result."""
    runs = 0

    def fails(steps: list[Step]) -> bool:
        nonlocal result, runs
        runs += 1
        tried = run_plan(Plan(result.plan.config, steps), bug)
        if tried.problems:
            result = tried
        return bool(tried.problems)

    size = max(1, len(result.plan.steps) // 2)
    while size and runs < runs_max:
        at = 0
        shrunk = False
        while at < len(result.plan.steps) and runs < runs_max:
            steps = result.plan.steps
            shrunk |= fails(steps[:at] + steps[at + size :])
            at += 0 if len(result.plan.steps) < len(steps) else size
        if not shrunk or size > 1:
            size //= 2
    for at, step in enumerate(result.plan.steps):
        if isinstance(step, Change):
            for each in step.attempts[1:]:
                if runs < runs_max:
                    current = result.plan.steps[at]
                    assert isinstance(current, Change)
                    fewer = tuple(other for other in current.attempts if other != each)
                    steps = list(result.plan.steps)
                    steps[at] = replace(current, attempts=fewer)
                    fails(steps)
    return result


def report(result: Result, name: str | None = None, crowds: int = 0) -> str:
    """The failure, its history, and the command to repeat it."""
    seed = result.plan.config.seed
    again = f"./scripts/simulate --start {seed} --seeds 1"
    if result.plan.config.store != "cassandra":
        again += f" --store {result.plan.config.store}"
    if crowds:
        again += f" --crowds {crowds}"
    lines = [f"seed {seed} fails:", *(f"  {each}" for each in result.problems[:10])]
    lines += ["settings:", f"  {result.plan.config}"]
    lines += ["steps:", *(f"  {step}" for step in result.plan.steps)]
    lines += ["trace:", *(f"  {line}" for line in result.trace)]
    lines.append(f"again: {again}{f' --bug {name}' if name else ''}")
    return "\n".join(lines)
