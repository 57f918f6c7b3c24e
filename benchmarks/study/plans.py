# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Which runs there are, in the order in which they decide something, and what each plan decides.

A plan makes its runs from the finished ones: rates and recipes that earlier plans chose are those of later plans.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .records import Row, best_rates
from .systems import SHAPES, SYSTEMS, Initialisation
from .training import Recipe, Run


# what the baseline's own plans chose, for all systems; widths and lengths of training that are studied
COMPUTE_OPTIMAL = {
    "5m": Recipe(tokens=100_000_000, batch=32),
    "10m": Recipe(tokens=210_000_000, batch=32),
    "20m": Recipe(tokens=390_000_000, batch=64),
}
HEAD_START = Recipe(tokens=30_000_000, batch=64)
RATES = {
    "draft": (8e-3,),
    "5m": (8e-3, 4e-3, 2e-3),
    "10m": (3e-3, 6e-3, 1.5e-3),
    "20m": (2e-3, 4e-3, 1e-3),
    "76m": (2e-3, 1e-3, 4e-3),
}
PAIR = ("vanilla", "Depth-Attention L/2")
SEEDS = (0, 1, 2)

# tokens per second of the vanilla decoder alone on an H200, and how much longer others take; they only decide what is
# started. Of 5m the first comes from the last part of a run that had the GPU alone, the second from runs that shared
# it; 76m was measured without graphs; the rest are guesses until `step_times` has run
TOKENS_PER_SECOND = {
    "draft": 6e6,
    "5m": 1.2e6,
    "10m": 0.8e6,
    "20m": 0.65e6,
    "76m": 0.4e6,
    "10m-12-layers": 1.2e6,
    "10m-48-layers": 0.5e6,
    "tiny": 2e4,
}
RELATIVE_TIME = {
    "vanilla": 1.0,
    "Depth-Attention L/4": 1.1,
    "Depth-Attention 1": 1.25,
    "Depth-Attention static": 1.85,
    "AttnRes block": 1.45,
    "AttnRes full": 2.4,
    "AttnRes static": 1.7,
    "DenseFormer": 1.4,
    "mHC": 1.8,
    "MoDA row 3": 1.15,
    "MoDA row 4": 1.3,
}


def relative_time(system: str) -> float:
    return RELATIVE_TIME.get(system, 1.05)


def expected_seconds(run: Run, rows: Iterable[Row]) -> float:
    """
    Alone on a GPU: by the steps of the same system at this shape when it was alone, of several runs the fastest; else
    the guess, corrected by how wrong the guesses at this shape were.

    How many really shared the GPU with a run that was one of several is not known, since others compile or start
    meanwhile. Its steps over the number of workers are the least that they can have taken alone; no guess is less.
    """
    rows = [row for row in rows if row.shape == run.shape and math.isfinite(row.step_ms)]
    recipe = run.recipe
    tokens = recipe.steps * recipe.batch * recipe.length
    own = [row for row in rows if row.system == run.system]
    alone = [seconds_per_token(row) for row in own if row.workers == 1]
    if alone:
        return tokens * min(alone)
    corrections = [seconds_per_token(row) / guessed(row.system, row.shape) for row in rows if row.workers == 1]
    guess = guessed(run.system, run.shape) * (statistics.median(corrections) if corrections else 1.0)
    least = min((seconds_per_token(row) for row in own), default=0.0)
    return tokens * max(guess, least)


def guessed(system: str, shape: str) -> float:
    """Seconds for a token."""
    return relative_time(system) / TOKENS_PER_SECOND[shape]


def seconds_per_token(row: Row) -> float:
    return row.step_ms / 1000 / (row.batch * row.length) / row.workers


def over_rates(systems: Iterable[str], shape: str, recipe: Recipe, seed: int = 0) -> list[Run]:
    """All systems at the first rate, then all at the second: after each round they can be compared."""
    systems = list(systems)
    return [Run(system, shape, replace(recipe, rate=rate), seed) for rate in rates_of(shape) for system in systems]


def rates_of(shape: str) -> tuple[float, ...]:
    """Learning rates to try; those for other depths are those for the same number of parameters."""
    return RATES[shape if shape in RATES else shape.split("-")[0]]


def finished(rows: Iterable[Row], shape: str, recipe: Recipe, seeds: Iterable[int] = (0,)) -> list[Row]:
    """The rows of a recipe at any rate."""
    kept = set()
    for row in rows:
        if row.shape == shape and row.seed in seeds and row.system in SYSTEMS:
            run = Run(row.system, shape, replace(recipe, rate=row.rate), row.seed, row.vocab_size)
            if run.key == row.key:
                kept.add(row)
    return sorted(kept, key=lambda row: (row.system, row.rate, row.seed))


def chosen_rate(rows: Iterable[Row], system: str, shape: str, recipe: Recipe) -> float:
    """The best of the finished ones of seed 0, or the first that will be tried."""
    best = best_rates(row for row in finished(rows, shape, recipe) if row.system == system)
    return best[system].rate if system in best else rates_of(shape)[0]


def first_look(rows: list[Row]) -> list[Run]:
    # what time is left shows whether the others run
    return [*over_rates(PAIR, "5m", COMPUTE_OPTIMAL["5m"]), *step_times(rows, steps=40)]


def second_look(rows: list[Row]) -> list[Run]:
    """
    Vanilla at twice the best rate of the first look; then the static control and others at that best rate, so that
    all pair with both of the first look, Depth-Attention being as good there as at its own best. In between, whether
    the other systems run: as long as their kernels are compiled, the first two have the GPU.
    """
    recipe = replace(COMPUTE_OPTIMAL["5m"], rate=8e-3)
    long = [
        Run("vanilla", "5m", replace(recipe, rate=16e-3)),
        *(Run(system, "5m", recipe) for system in ("Depth-Attention static", "value residual", "AttnRes block")),
    ]
    short = [run for run in step_times(rows, steps=12) if run.system not in (*PAIR, "Depth-Attention static")]
    return [*long[:2], *short, *long[2:]]


def baseline(rows: list[Row], shape: str = "5m") -> list[Run]:
    recipe = COMPUTE_OPTIMAL[shape]
    best = replace(recipe, rate=chosen_rate(rows, "vanilla", shape, recipe))
    variants = [
        replace(best, rate=2 * best.rate),
        replace(best, rate=best.rate / 2),
        # at this rate, runs of one seed part in their first fifth, while the loss falls steeply
        replace(best, warm_up=0.15),
        replace(best, start=Initialisation(scaled_output=False)),
        replace(best, start=Initialisation(std=0.04)),
        replace(best, start=Initialisation(embedding_std=0.3)),
        replace(best, batch=best.batch // 2),
        replace(best, batch=2 * best.batch),
        replace(best, decay=0.01),
        replace(best, last=0.01),
    ]
    return [Run("vanilla", shape, each) for each in (best, *variants)]


# by what they tell: the families and the controls of static weights first, then variants
BY_INTEREST = (
    "vanilla",
    "Depth-Attention L/2",
    "value residual",
    "AttnRes block",
    "Depth-Attention static",
    "DenseFormer",
    "AttnRes static",
    "mHC",
    "MoDA row 4",
    "MoDA row 3",
    "norm control",
    "Depth-Attention 1",
    "Depth-Attention L/4",
    "AttnRes full",
    "looped vanilla",
    "looped Depth-Attention",
)


def rates(rows: list[Row], shape: str, recipe: Recipe) -> list[Run]:
    return over_rates(BY_INTEREST, shape, recipe)


def seeds(rows: list[Row], shape: str, recipe: Recipe) -> list[Run]:
    return [
        Run(system, shape, replace(recipe, rate=chosen_rate(rows, system, shape, recipe)), seed)
        for seed in SEEDS
        for system in BY_INTEREST
    ]


def budgets(rows: list[Row], shape: str = "5m") -> list[Run]:
    recipe = COMPUTE_OPTIMAL[shape]
    recipe = replace(recipe, rate=chosen_rate(rows, "vanilla", shape, recipe))
    return [
        Run("vanilla", shape, replace(recipe, tokens=round(recipe.tokens * factor)), seed)
        for seed in SEEDS[:1]
        for factor in (1, 1.5, 2, 3)
    ]


def models(rows: list[Row]) -> list[Run]:
    """A seed that no comparison uses, so that these runs are trained even where all comparisons are finished."""
    recipe = COMPUTE_OPTIMAL["5m"]
    named = [*((system, "5m") for system in (*PAIR, "AttnRes block")), ("vanilla", "draft")]
    return [
        Run(system, shape, replace(recipe, rate=chosen_rate(rows, system, shape, recipe)), seed=len(SEEDS))
        for system, shape in named
    ]


def depths(rows: list[Row]) -> list[Run]:
    recipe = COMPUTE_OPTIMAL["10m"]
    return [
        Run(system, shape, replace(recipe, rate=chosen_rate(rows, system, shape, recipe)))
        for shape in ("10m-12-layers", "10m", "10m-48-layers")
        for system in PAIR
    ]


def step_times(rows: list[Row], shape: str = "5m", steps: int = 100) -> list[Run]:
    recipe = COMPUTE_OPTIMAL.get(shape, HEAD_START)
    recipe = replace(recipe, tokens=steps * recipe.batch * recipe.length)
    return [Run(system, shape, recipe) for system in SYSTEMS]


def tiny(rows: list[Row]) -> list[Run]:
    recipe = Recipe(tokens=16 * 4 * 64, batch=4, length=64, rate=1e-2)
    return [Run(system, "tiny", recipe, vocab_size=512) for system in SYSTEMS]


@dataclass(frozen=True)
class Plan:
    """The runs that follow from the finished ones, and what they decide."""

    runs: Callable[[list[Row]], list[Run]]
    decides: str


def _both(shape: str, recipe: Recipe, what: str) -> dict[str, Plan]:
    return {
        f"rates_{what}": Plan(
            lambda rows: rates(rows, shape, recipe),
            f"each system's rate of three, one seed, {shape} at {recipe.tokens / 1e6:g}M tokens",
        ),
        f"seeds_{what}": Plan(
            lambda rows: seeds(rows, shape, recipe),
            f"which differences are more than noise: three paired seeds at each system's best rate, {shape}",
        ),
    }


PLANS = {
    "first_look": Plan(
        first_look,
        "whether the gap of the first look is there at 20 tokens per parameter, with both rates tuned; and that all "
        "systems run",
    ),
    "second_look": Plan(
        second_look,
        "whether the gap survives a vanilla decoder with a still larger rate; whether static weights and a value "
        "residual have it too; and that all systems run as graphs",
    ),
    "baseline": Plan(baseline, "rate, initialisation, warm-up, batch and decay of the vanilla decoder"),
    "step_times": Plan(
        step_times, "milliseconds of a step of each system alone, for the comparison at equal time (one worker)"
    ),
    **_both("5m", COMPUTE_OPTIMAL["5m"], "5m"),
    "models": Plan(
        models,
        "nothing new: the pair and Attention Residuals once more, and a vanilla decoder of two layers that drafts "
        "for them, to keep with `--models`",
    ),
    "budgets": Plan(budgets, "how much longer the vanilla decoder must train to be as good: its loss by tokens"),
    **_both("76m", HEAD_START, "head_start"),
    **_both("76m", replace(HEAD_START, tokens=150_000_000), "head_start_150m"),
    **_both("10m", COMPUTE_OPTIMAL["10m"], "10m"),
    "depths": Plan(depths, "whether the gain grows with depth: 12, 24 and 48 layers of the same parameters"),
    **_both("20m", COMPUTE_OPTIMAL["20m"], "20m"),
    "step_times_76m": Plan(lambda rows: step_times(rows, "76m", 40), "as step_times, for the head start"),
    "tiny": Plan(tiny, "nothing: all systems for a few steps, to see that everything runs"),
}


def unique(runs: Iterable[Run]) -> list[Run]:
    return list({run.key: run for run in runs}.values())


assert set(BY_INTEREST) == set(SYSTEMS) and set(SHAPES) == set(TOKENS_PER_SECOND)
