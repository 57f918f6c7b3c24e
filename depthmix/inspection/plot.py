# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Pictures of what a model does with its sources, by matplotlib, which the extra `plot` installs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from depthmix.hub import replacing

from .causal import importance_map
from .measures import DepthMap, Magnitudes, depth_weights, gate_values, make_map, output_magnitudes


# a map with more cells has no numbers in them
MOST_NUMBERS = 150


def plot(model: nn.Module, inputs: Mapping[str, Tensor], path: str | Path, importance: bool = False) -> Path:
    """
    Draws, for one batch, the mean depth weights of each target by source, how evenly each target uses its sources,
    how large hidden states and outputs are, and the gates if there are any.

    Args:
        model, inputs: as in [`~depthmix.inspection.depth_weights`].
        path (`str` or `Path`):
            The picture, in the format that its ending names: png, pdf, svg and what else matplotlib can write.
        importance (`bool`, *optional*, defaults to `False`):
            Whether to draw [`~depthmix.inspection.importance_map`] too, which takes a forward for each weight.

    Returns:
        `Path` of the picture.

    Raises:
        `ImportError`: if matplotlib is not installed.
        `ValueError`: for an ending that it does not know, or if the model mixes nothing.
        `OSError`: if the picture cannot be written. What was there before then still is.
        What [`~depthmix.inspection.depth_weights`] raises.
    """
    path, figure_class = check_picture(path)
    rows = depth_weights(model, inputs)
    weights = make_map([row.site for row in rows], [row.mean().mean(0) for row in rows])
    entropies = {row.site.target: row.mean_entropy() for row in rows if len(row.site.sources) > 1}
    maps = [("mean weight", weights)]
    if importance:
        maps.append(("loss without it, less loss", importance_map(model, inputs)))
    gates = gate_values(model)

    height = 1.6 + 0.26 * len(weights.targets)
    width = 1.8 + max(2.2, (0.42 if _has_numbers(weights) else 0.2) * len(weights.sources))
    widths = [*[width] * len(maps), 2.6, 4.0, *([2.6] if gates else [])]
    figure = figure_class(figsize=(sum(widths), max(3.6, height)), layout="constrained")
    panels = [*figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]]
    for title, each in maps:
        _draw_map(panels.pop(0), each, title)
    _draw_by_target(panels.pop(0), weights.targets, entropies, "entropy of source usage\n(1: all alike)")
    _draw_magnitudes(panels.pop(0), output_magnitudes(model, inputs))
    if gates:
        _draw_gates(panels.pop(0), gates)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format=path.suffix[1:].lower())
    return path


def check_picture(path: str | Path) -> tuple[Path, Any]:
    """
    The path of a picture and the class of figures, if one can be drawn there.

    Raises:
        `ImportError`: if matplotlib is not installed.
        `ValueError`: for an ending that it does not know.
        `FileNotFoundError`: if there is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: `pip install matplotlib`") from error
    path = Path(path)
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path}: a picture must end in one of {', '.join(f'.{each}' for each in known)}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder.")
    return path, Figure


def _has_numbers(found: DepthMap) -> bool:
    return found.values.numel() <= MOST_NUMBERS


def _draw_map(axes: Any, found: DepthMap, title: str) -> None:
    values = found.values.float()
    largest = values.nan_to_num().abs().max().item() or 1.0
    # weights of either sign have zero in the middle
    is_signed = bool((values < -1e-6).any())
    lowest, colors = (-largest, "RdBu_r") if is_signed else (0, "viridis")
    image = axes.imshow(
        values.tolist(), aspect="auto", vmin=lowest, vmax=largest, cmap=colors, interpolation="nearest"
    )
    axes.set_title(title)
    axes.set_xticks(range(len(found.sources)), found.sources, rotation=90, fontsize=8)
    axes.set_yticks(range(len(found.targets)), found.targets, fontsize=8)
    axes.set(xlabel="source", ylabel="target")
    if not _has_numbers(found):
        axes.figure.colorbar(image, ax=axes, shrink=0.6)
        return
    for y, line in enumerate(values.tolist()):
        for x, value in enumerate(line):
            if not math.isnan(value):
                is_dark = abs(value) > 0.7 * largest if is_signed else value < 0.6 * largest
                # a sum with zero has no sign if it is zero
                text = f"{round(value, 2) + 0.0:.2f}" if largest >= 0.2 else f"{value:.0e}"
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if is_dark else "black")


def _draw_by_target(axes: Any, targets: tuple[str, ...], numbers: Mapping[str, float], title: str) -> None:
    places = [targets.index(target) for target in numbers]
    axes.barh(places, [*numbers.values()], color="tab:blue")
    axes.set_title(title)
    axes.set(xlim=(0, 1), ylim=(len(targets) - 0.5, -0.5))
    axes.set_yticks(range(len(targets)), targets, fontsize=8)
    axes.grid(axis="x", alpha=0.3)


def _draw_magnitudes(axes: Any, found: Magnitudes) -> None:
    places = range(len(found.layers))
    for name, sizes in (
        ("after the layer", found.hidden_states),
        ("attention adds", found.attention),
        ("mlp adds", found.mlp),
    ):
        axes.plot(places, sizes.tolist(), marker="o", markersize=3, label=name)
    axes.set_title("root mean square of outputs")
    axes.set_yscale("log")
    # at most about a dozen names are legible
    step = max(1, len(found.layers) // 12)
    axes.set_xticks(places[::step], found.layers[::step], rotation=90, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_gates(axes: Any, gates: Mapping[str, Tensor]) -> None:
    for place, values in enumerate(gates.values()):
        axes.scatter(values.tolist(), [place] * values.numel(), s=10, color="tab:blue", alpha=0.6)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_title("gates of heads")
    axes.set(ylim=(len(gates) - 0.5, -0.5))
    axes.set_yticks(range(len(gates)), [*gates], fontsize=8)
    axes.grid(axis="x", alpha=0.3)


def plot_text(model: str, text: str | Path, path: str | Path, tokens: int = 512, importance: bool = False) -> Path:
    """
    [`plot`] of a saved model and the beginning of a text. Code that lies beside the model is not run.

    Args:
        model (`str`):
            Folder of a saved model of this package, with a tokenizer, or Hub id.
        text (`str` or `Path`):
            A file of text in UTF-8.
        path, importance: as in [`plot`].
        tokens (`int`, *optional*, defaults to 512):
            How many tokens of the text at most.

    Returns:
        `Path` of the picture.

    Raises:
        `ValueError`: if there are fewer than two tokens, the file is no text, or the model is none of this package.
        What [`plot`] raises, and `OSError` if a file is missing.
    """
    if tokens < 2:
        raise ValueError(f"tokens={tokens}: must be at least 2.")
    # before the model is loaded, which takes longest
    check_picture(path)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is no text in UTF-8: {error}.") from error
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from depthmix.families import FAMILIES

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{model} is a {config.model_type}: must be a model of depthmix. `depthmix convert` makes one."
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    ids = tokenizer(content, return_tensors="pt", truncation=True, max_length=tokens)
    if ids["input_ids"].shape[1] < 2:
        raise ValueError(f"{text} has fewer than two tokens.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
    return plot(loaded.to("cuda" if torch.cuda.is_available() else "cpu"), dict(ids), path, importance)
