# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Tables over finished runs."""

from collections.abc import Iterable, Iterator

from .records import Row, best_rates, compare
from .systems import SYSTEMS


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by settings, those that were trained the longest first."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        key = (row.shape, row.tokens, row.batch, row.length, row.vocab_size, row.corpus, *recipe_of(row))
        found.setdefault(key, []).append(row)
    return sorted(found.values(), key=lambda group: sum(row.tokens for row in group), reverse=True)


def recipe_of(row: Row) -> tuple:
    return (
        *(row.warm_up, row.last, row.decay, row.beta_1, row.beta_2, row.clip),
        *(row.std, row.scaled_output, row.embedding_std),
    )


def table(rows: list[Row]) -> Iterator[str]:
    """
    A line of Markdown for each system, from rows with the same settings: its losses of seed 0 by rate, and at the best
    rate bits per byte, milliseconds of a step, and the paired difference from its control at the control's best.
    """
    first = rows[0]
    yield (
        f"**{first.shape}, {first.tokens / 1e6:g}M tokens, {first.batch} × {first.length} a step, start "
        f"{first.std:g}{' scaled' if first.scaled_output else ''}"
        f"{'' if first.embedding_std is None else f', embedding {first.embedding_std:g}'}, warm-up {first.warm_up:g}, "
        f"last {first.last:g}, decay {first.decay:g}, corpus {first.corpus}**\n"
    )
    yield "| system | size | loss by rate (seed 0) | bits per byte | ms a step | difference | 95 % | p | pairs | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    of_seed_0 = [row for row in rows if row.seed == 0]
    best = best_rates(of_seed_0)
    for name in SYSTEMS:
        own = sorted((row for row in of_seed_0 if row.system == name), key=lambda row: row.rate)
        if not own:
            continue
        marked = {row.key: f"{row.loss:.4f}" for row in own}
        if name in best:
            marked[best[name].key] = f"**{best[name].loss:.4f}**"
        by_rate = ", ".join(f"{row.rate:g}: {marked[row.key]}" for row in own)
        cells = [name, f"{own[0].parameters / 1e6:.2f}M", by_rate]
        if name not in best:
            yield f"| {' | '.join(cells)} | | | | | | | diverged |"
            continue
        workers = best[name].workers
        at_a_time = f" ({workers} at a time)" if workers > 1 else ""
        cells += [f"{best[name].bits_per_byte:.4f}", f"{best[name].step_ms:.2f}{at_a_time}"]
        control = SYSTEMS[name].control
        if control == name or control not in best:
            yield f"| {' | '.join(cells)} | | | | | |"
            continue
        sides = [
            [row for row in rows if (row.system, row.rate) == (each, best[each].rate)] for each in (name, control)
        ]
        found = compare(*sides)
        interval = f"± {found.half_width:.4f} | {found.p_value:.2g}" if found.pairs > 1 else " | "
        yield f"| {' | '.join(cells)} | {found.mean:+.4f} | {interval} | {found.pairs} | {found.verdict} |"


def summary(rows: Iterable[Row]) -> str:
    """Tables of all settings that a comparison was run with, which begins with seed 0."""
    compared = [group for group in groups(rows) if any(row.seed == 0 for row in group)]
    return "\n\n".join("\n".join(table(group)) for group in compared)
