# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`benchmarks.study` at a size that runs anywhere: what its comparisons rest on."""

import csv
import importlib
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: F401


ROOT = Path(__file__).parents[2]
WORDS = ("alpha", "beta", "gamma", "delta", "naïve", "größe", "数据", "return", "yield", "lambda")


@pytest.fixture(scope="module")
def study():
    """The modules of the study, by name."""
    sys.path.insert(0, str(ROOT))
    try:
        names = (
            "__main__",
            "corpus",
            "plans",
            "plots",
            "records",
            "report",
            "static_routing",
            "systems",
            "training",
            "worker",
        )
        modules = {name: importlib.import_module(f"benchmarks.study.{name}") for name in names}
        yield type("Study", (), modules)
    finally:
        sys.path.remove(str(ROOT))


def write_packages(root: Path, count: int = 6, lines: int = 120) -> None:
    """Packages of several files; two files of different packages are the same, and some long lines are in all."""
    generator = torch.Generator().manual_seed(0)
    for package in range(count):
        folder = root / f"package{package}"
        folder.mkdir(parents=True)
        for module in range(2):
            picks = torch.randint(len(WORDS), (lines, 6), generator=generator).tolist()
            own = [" ".join(WORDS[i] for i in pick) + f" {package} {n}" for n, pick in enumerate(picks)]
            own[3] = "# a licence that every file of every package repeats"
            own[4] = "pass"
            own[5] = 'end = "<|endoftext|>"'
            (folder / f"module{module}.py").write_text("\n".join(own), encoding="utf-8")
    (root / "package1" / "copied.py").write_text((root / "package0" / "module0.py").read_text())


@pytest.fixture(scope="module")
def corpus(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_packages(folder / "source")
    return study.corpus.build_corpus(
        folder / "corpus",
        [folder / "source"],
        vocab_size=300,
        split=study.corpus.Split(held_out=0.2, largest=0.3),
        processes=1,
    )


def text_of(study, corpus, folder: Path, part: str) -> str:
    tokenizer = study.corpus.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(getattr(corpus, part).tolist(), skip_special_tokens=False)


def tiny_run(study, system="vanilla", **fields):
    recipe = {"tokens": 12 * 4 * 32, "batch": 4, "length": 32, "rate": 1e-2}
    settings = {name: fields.pop(name) for name in ("seed",) if name in fields}
    return study.training.Run(system, "tiny", study.training.Recipe(**recipe | fields), vocab_size=300, **settings)


def test_the_split_is_by_package_and_leaks_no_long_line(study, tmp_path):
    write_packages(tmp_path / "source")
    split = study.corpus.Split(held_out=0.2, largest=0.3)
    corpus = study.corpus.build_corpus(
        tmp_path / "corpus", [tmp_path / "source"], vocab_size=300, split=split, processes=2
    )
    described = corpus.description
    assert described.train_packages and described.held_out_packages
    assert not described.train_packages.keys() & described.held_out_packages.keys()
    texts = {part: text_of(study, corpus, tmp_path / "corpus", part) for part in ("train", "held_out")}
    lines = {
        part: [line for line in text.splitlines() if len(line.strip()) >= study.corpus.LONG_LINE]
        for part, text in texts.items()
    }
    assert lines["train"] and lines["held_out"]
    assert not set(lines["train"]) & set(lines["held_out"])
    # a long line is there once, a short one stays wherever it was, and the copied file is not there again
    for found in lines.values():
        assert len(found) == len(set(found))
    licence = "# a licence that every file of every package repeats"
    assert sum(text.count(licence) for text in texts.values()) == 1
    assert sum(text.count("\npass\n") for text in texts.values()) == 12
    # the same with one process, in which there is nothing to put together
    alone = study.corpus.build_corpus(
        tmp_path / "alone", [tmp_path / "source"], vocab_size=300, split=split, processes=1
    )
    assert alone.description == described
    for part, packages in (("train", described.train_packages), ("held_out", described.held_out_packages)):
        files = getattr(corpus, part).tolist().count(0)
        assert texts[part].count(study.corpus.END_OF_TEXT) == 2 * files
        # each document has the text of the token that ends it, and the token
        text = texts[part].replace("\n" + study.corpus.END_OF_TEXT, "\n")
        assert len(text.encode()) == sum(packages.values()) == getattr(described, f"{part}_bytes")
        assert len(getattr(corpus, part)) == getattr(described, f"{part}_tokens")


def test_projects_with_several_folders_are_one_package(study):
    assert {study.corpus.package_of(name) for name in ("torch", "_torch_tools", "torch_geometric")} == {"torch"}
    assert study.corpus.package_of("torchvision") != "torch"


def test_a_corpus_is_read_where_it_is_finished_and_left_out_where_it_failed(study, tmp_path):
    write_packages(tmp_path / "source", count=3)
    options = {"split": study.corpus.Split(held_out=0.2, largest=0.5), "processes": 1}
    with pytest.raises(ValueError, match="vocab_size=100000"):
        study.corpus.build_corpus(tmp_path / "corpus", [tmp_path / "source"], vocab_size=100000, **options)
    with pytest.raises(FileNotFoundError, match="absent"):
        study.corpus.build_corpus(tmp_path / "corpus", [tmp_path / "absent"], vocab_size=300, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    first = study.corpus.build_corpus(tmp_path / "corpus", [tmp_path / "source"], vocab_size=300, **options)
    again = study.corpus.build_corpus(tmp_path / "corpus", [tmp_path / "absent"], vocab_size=300, **options)
    assert first.description == again.description


def test_bits_per_byte_count_the_bytes_of_what_is_predicted(study, corpus):
    trainer = study.training.Trainer(tiny_run(study), corpus, "cpu")
    with torch.no_grad():
        # all tokens are as likely as each other
        trainer.model.model.norm.weight.zero_()
    nats, bits = trainer.held_out_loss()
    assert nats == pytest.approx(math.log(300), rel=1e-6)
    windows = len(corpus.held_out) // 32
    predicted = corpus.held_out[: windows * 32].reshape(windows, 32)[:, 1:].ravel()
    vocabulary = study.corpus.Tokenizer.from_file(str(Path(corpus.train.filename).parent / "tokenizer.json"))
    end = vocabulary.token_to_id(study.corpus.END_OF_TEXT)
    # one character of the alphabet of byte-level BPE is a byte
    size = sum(len(vocabulary.id_to_token(token)) for token in predicted.tolist() if token != end)
    assert bits == pytest.approx(len(predicted) * math.log2(300) / size, rel=1e-6)


def test_token_bytes_add_up_to_the_text(study, corpus):
    for part in ("train", "held_out"):
        stream = getattr(corpus, part)
        assert corpus.token_bytes[stream].sum() == getattr(corpus.description, f"{part}_bytes")


@pytest.mark.parametrize("system", ["vanilla", "Depth-Attention L/2", "AttnRes block"])
def test_a_run_that_was_stopped_goes_on_exactly(study, corpus, tmp_path, monkeypatch, system):
    run = tiny_run(study, system)
    whole = study.training.Trainer(run, corpus, "cpu")
    expected = whole.train()
    path = tmp_path / "kept.pt"
    monkeypatch.setattr(study.training, "STEPS_PER_LOOK", 1)
    for stop_at in (5, 8):
        trainer = study.training.Trainer(run, corpus, "cpu")

        def stop(deadline, checkpoint, trainer=trainer, stop_at=stop_at):
            if trainer.step == stop_at:
                study.training.Trainer.stop_in_time(trainer, -1.0, checkpoint)

        monkeypatch.setattr(trainer, "stop_in_time", stop)
        with pytest.raises(study.training.Paused, match=f"kept after step {stop_at} of 12"):
            trainer.train(deadline=0.0, checkpoint=path)
    trainer = study.training.Trainer(run, corpus, "cpu")
    outcome = trainer.train(deadline=None, checkpoint=path)
    assert trainer.calls == 12 - 8
    assert not path.exists()
    assert torch.equal(trainer.losses, whole.losses)
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, trainer.model.state_dict()[name])
    assert (outcome.loss, outcome.bits_per_byte) == (expected.loss, expected.bits_per_byte)
    assert outcome.depth_weights == expected.depth_weights


def test_a_checkpoint_of_another_run_is_refused(study, corpus):
    state = study.training.Trainer(tiny_run(study), corpus, "cpu").state()
    other = study.training.Trainer(tiny_run(study, seed=1), corpus, "cpu")
    with pytest.raises(ValueError, match="of another run: its key"):
        other.load_state(state)


def test_without_a_checkpoint_a_run_stops_when_its_time_is_up(study, corpus):
    trainer = study.training.Trainer(tiny_run(study), corpus, "cpu")
    with pytest.raises(study.training.Paused, match="nothing is kept"):
        trainer.train(deadline=0.0)
    assert trainer.step == 1


def test_all_systems_see_the_same_data_and_start_alike(study, corpus):
    trainers = [study.training.Trainer(tiny_run(study, system), corpus, "cpu") for system in study.systems.SYSTEMS]
    first = trainers[0]
    for trainer in trainers[1:]:
        assert torch.equal(trainer.order, first.order)
    assert not torch.equal(study.training.Trainer(tiny_run(study, seed=1), corpus, "cpu").order, first.order)
    by_system = dict(zip(study.systems.SYSTEMS, trainers, strict=True))
    shared = first.model.state_dict()
    for system in ("Depth-Attention 1", "Depth-Attention static", "AttnRes full", "AttnRes static", "mHC"):
        state = by_system[system].model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in shared.items())
    # in every epoch each window once, in another order
    windows = len(corpus.train) // 32
    order = study.training.data_order(0, windows, 2 * windows)
    assert sorted(order[:windows].tolist()) == sorted(order[windows:].tolist()) == list(range(windows))
    assert not torch.equal(order[:windows], order[windows:])


def test_every_system_trains_and_tells_its_weights(study, corpus):
    systems = study.systems
    for name, system in systems.SYSTEMS.items():
        trainer = study.training.Trainer(tiny_run(study, name), corpus, "cpu")
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        # what starts at zero keeps others from moving in the first
        trainer.take_step()
        trainer.take_step()
        moved = [not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True)]
        assert sum(moved) > 0.9 * len(moved)
        weights = trainer.depth_weights()
        assert (weights is not None) == (system.returns_weights or system.model_type is None)
        for layer in weights["mean"] if weights else ():
            totals = torch.tensor(layer).sum(-1)
            torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=1e-5)


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(3, 300, (2, 32), generator=torch.Generator().manual_seed(seed))


def awake_static(study, system: str):
    model = study.systems.build(system, "tiny", 300, 32)
    with torch.no_grad():
        for logits in (*model.value_logits.values(), *model.site_logits.values()):
            logits.normal_(generator=torch.Generator().manual_seed(7))
    return model


@pytest.mark.parametrize("system", ["Depth-Attention static", "AttnRes static"])
def test_static_routing_does_not_look_at_the_input(study, system, monkeypatch):
    """The weights that a forward really uses, of two inputs; and they matter."""
    model = awake_static(study, system)
    assert any(parameter.requires_grad and "logits" in name for name, parameter in model.named_parameters())
    used = []
    softmax = torch.Tensor.softmax

    def recorded(self, *args, **kwargs):
        weights = softmax(self, *args, **kwargs)
        used[-1].append(weights)
        return weights

    monkeypatch.setattr(torch.Tensor, "softmax", recorded)
    outputs = []
    for seed in (0, 1):
        used.append([])
        outputs.append(model(token_ids(seed)).logits)
    monkeypatch.undo()
    assert len(used[0]) == len(model.value_logits) + len(model.site_logits) > 0
    for first, second, told in zip(*used, model.depth_weights(), strict=True):
        assert torch.equal(first, second) and torch.equal(first, told)
        # one number for each source (and head), none for a token
        assert first.numel() == told.numel() and first.shape[-1] > 1
    with torch.no_grad():
        for logits in (*model.value_logits.values(), *model.site_logits.values()):
            logits.zero_()
    assert (model(token_ids(0)).logits - outputs[0]).abs().max() > 1e-4


def test_static_weights_are_told_in_the_order_of_layers_and_sites(study):
    layers = 12
    config = study.systems.Shape(layers, 8, 1, 1, 8).fields(300, 32)
    sources = [tuple(range(layer)) for layer in range(layers)]
    values = study.static_routing.StaticRouting(Qwen3Config(**config), value_sources=sources)
    assert [each.shape[-1] for each in values.depth_weights()] == list(range(2, layers + 1))
    sites = study.static_routing.StaticRouting(Qwen3Config(**config), block_size=1)
    assert [each.shape[-1] for each in sites.depth_weights()] == list(range(2, 2 * layers + 2))


def test_pictures_show_the_best_runs_of_what_was_trained_the_longest(study, tmp_path):
    losses = {("vanilla", 1e-3, 0): 2.0, ("vanilla", 2e-3, 0): 1.9, ("vanilla", 1e-3, 1): 1.0, ("mHC", 1e-3, 0): 1.8}
    rows = rows_of(study, losses)
    short = rows_of(study, {(system, 3e-3, 0): 0.5 for system in study.systems.SYSTEMS}, tokens=7)
    path = tmp_path / "some.jsonl"
    for row in [*rows, *short]:
        run = SimpleNamespace(key=row.key, label=row.system)
        outcome = SimpleNamespace(curve=[(row.tokens, 1.0, row.loss, row.loss)], depth_weights=None)
        study.records.append_details(path, run, outcome)
    details = study.plots.read_details([path])
    assert study.plots.shown_rows([*short, *rows], details) == [rows[1], rows[3]]
    # without its curve a run is not drawn
    assert study.plots.shown_rows(rows, {rows[0].key: details[rows[0].key]}) == [rows[0]]
    with pytest.raises(ValueError, match="nothing to draw"):
        study.plots.shown_rows(rows, {})
    assert study.plots.by_source([[[0.25, 0.75], [0.75, 0.25]], [0.1, 0.9]]) == [[0.5, 0.5], [0.1, 0.9]]


def test_pictures_are_drawn_of_the_committed_runs(study, tmp_path):
    pytest.importorskip("matplotlib")
    study.__main__.main(["--plots", str(tmp_path / "pictures"), "--out", str(tmp_path)])
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "study_curves.png",
        "study_depth_weights.png",
    }


def test_without_matplotlib_pictures_are_refused(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        study.__main__.main(["--plots", str(tmp_path / "pictures"), "--out", str(tmp_path)])
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()


def test_without_routing_the_control_is_the_stock_model(study):
    config = study.systems.configuration("AttnRes static", "tiny", 300, 32)
    torch.manual_seed(0)
    model = study.static_routing.StaticRouting(config)
    stock = Qwen3ForCausalLM(config)
    stock.load_state_dict(model.state_dict())
    expected, actual = (each(token_ids(0), labels=token_ids(0)) for each in (stock, model))
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.parametrize(
    ("static", "selective"),
    [("Depth-Attention static", "Depth-Attention L/2"), ("AttnRes static", "AttnRes block")],
)
def test_controls_have_the_sources_of_what_they_control(study, static, selective):
    """Where neither prefers a source, both are the same model."""
    models = [study.systems.build(name, "tiny", 300, 32) for name in (static, selective)]
    with torch.no_grad():
        for model in models:
            for layer in model.model.layers:
                # queries of zero weigh all sources, and all tokens, alike
                layer.self_attn.q_norm.weight.zero_()
    first, second = (model(token_ids(0)).logits for model in models)
    torch.testing.assert_close(first, second)
    vanilla = study.systems.build("vanilla", "tiny", 300, 32)
    with torch.no_grad():
        for layer in vanilla.model.layers:
            layer.self_attn.q_norm.weight.zero_()
    assert (vanilla(token_ids(0)).logits - first).abs().max() > 1e-4


def test_every_system_is_in_the_plans_and_its_control_among_the_systems(study):
    systems = study.systems.SYSTEMS
    assert {system.control for system in systems.values()} <= systems.keys()
    for name, plan in study.plans.PLANS.items():
        runs = study.plans.unique(plan.runs([]))
        assert runs and plan.decides
        if name.startswith(("rates_", "seeds_", "step_times")):
            assert {run.system for run in runs} == systems.keys()


def rows_of(study, losses: dict, **fields):
    """Rows of runs with these losses by system, rate and seed."""
    recipe = study.plans.COMPUTE_OPTIMAL["5m"]
    environment = dict.fromkeys(("gpu", "depthmix", "torch", "transformers", "triton", "date"), "x")
    rows = []
    for (system, rate, seed), loss in losses.items():
        run = study.training.Run(system, "5m", replace(recipe, rate=rate), seed)
        outcome = study.training.Outcome(
            *(5, recipe.steps, loss, loss / 2, loss, 10.0, 1.0, 1.0, "graph"), curve=[(1, 1.0, loss, loss)]
        )
        rows.append(replace(study.records.row_of(run, outcome, "sum", 1, environment), **fields))
    return rows


def test_later_plans_take_the_rates_that_earlier_ones_chose(study):
    low, middle, high = sorted(study.plans.RATES["5m"])
    rows = rows_of(
        study,
        {
            ("vanilla", low, 0): 1.5,
            ("vanilla", middle, 0): 1.4,
            ("vanilla", high, 0): math.nan,
            ("mHC", high, 0): 1.3,
            ("mHC", low, 0): 1.35,
            # not of the seed that rates are chosen with
            ("vanilla", low, 1): 1.0,
        },
    )
    runs = study.plans.PLANS["seeds_5m"].runs(rows)
    rates = {run.system: {other.recipe.rate for other in runs if other.system == run.system} for run in runs}
    assert rates["vanilla"] == {middle} and rates["mHC"] == {high}
    assert {run.seed for run in runs} == {0, 1, 2}
    # what is finished is known by its key
    assert {row.key for row in rows} & {run.key for run in runs} == {rows[1].key, rows[3].key}


def study_of(study, tmp_path, rows=(), *, left: float, workers=2, checkpoints=None, plan="second_look"):
    arguments = SimpleNamespace(
        plan=plan, systems=None, workers=workers, checkpoints=checkpoints, out=tmp_path, cache=tmp_path
    )
    return study.__main__.Study(arguments, list(rows), 1000.0 + left)


def test_runs_are_started_while_there_is_time_for_them(study, tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(study.__main__.time, "monotonic", lambda: clock[0])
    # 92 s alone; of two together it is not known how long either takes alone
    rows = rows_of(study, {("vanilla", 4e-3, 0): 1.5, ("Depth-Attention L/2", 4e-3, 0): 1.5}, step_ms=30.0)
    run = study.plans.PLANS["first_look"].runs([])[0]
    alone = study.plans.expected_seconds(run, rows)
    assert alone == pytest.approx(100e6 / 32768 * 0.03, rel=1e-3)
    guess = study.plans.expected_seconds(run, [])
    for step_ms, expected in ((1.0, guess), (90.0, 1.5 * alone)):
        together = [replace(row, step_ms=step_ms, workers=2) for row in rows]
        assert study.plans.expected_seconds(run, together) == pytest.approx(expected)
    for left, count in ((90, 0), (120, 1), (190, 1), (240, 2), (10_000, 4)):
        found = study_of(study, tmp_path, rows, left=left, plan="first_look")
        found.waiting = [run for run in found.waiting if run.recipe.tokens > 1e8 - 1]
        started = [found.next_run() for _ in range(4)]
        assert sum(run is not None for run in started) == count, left
    # an ending run leaves its part to the others, and what is done of one need not be done again
    found = study_of(study, tmp_path, rows, left=235, plan="first_look")
    found.waiting = found.waiting[:2]
    first = found.next_run()
    clock[0] += 90
    assert found.next_run() is None
    found.checksum, found.environment = "", {}
    found.note(first, {"paused": "to see"})
    assert found.next_run() is not None and found.next_run() is None


def test_with_checkpoints_too_nothing_is_started_when_the_time_is_up(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study.__main__.time, "monotonic", lambda: 1000.0)
    assert study_of(study, tmp_path, left=60, checkpoints=tmp_path).next_run() is not None
    few = study_of(study, tmp_path, left=20, checkpoints=tmp_path)
    # what fits is started all the same
    assert few.next_run().recipe.steps == 12
    assert study_of(study, tmp_path, left=3, checkpoints=tmp_path).next_run() is None
    assert study_of(study, tmp_path, left=-1, checkpoints=tmp_path).next_run() is None


def test_what_the_second_look_trains_is_paired_with_the_first(study):
    looks = [study.plans.PLANS[name].runs([]) for name in ("first_look", "second_look")]
    assert not {run.key for run in looks[0]} & {run.key for run in looks[1]}
    first, second = (
        [run for run in runs if run.recipe.tokens == study.plans.COMPUTE_OPTIMAL["5m"].tokens] for runs in looks
    )
    assert {run.system for run in second} == {
        *("vanilla", "Depth-Attention static", "value residual", "AttnRes block")
    }
    for run in second:
        same = [other for other in first if other.recipe == run.recipe and other.seed == run.seed]
        rates = [other.recipe.rate for other in first]
        assert {other.system for other in same} == set(study.plans.PAIR) or run.recipe.rate > max(rates)
    # every system is trained in one of the two
    assert {run.system for runs in looks for run in runs} == study.systems.SYSTEMS.keys()


def test_pairs_give_the_interval_and_p_value_of_students_test(study):
    losses = {("vanilla", 1e-3, seed): 2.0 + 0.1 * seed for seed in range(3)}
    losses |= {("mHC", 2e-3, seed): 2.0 + 0.1 * seed - gain for seed, gain in enumerate((0.01, 0.02, 0.03))}
    rows = rows_of(study, losses)
    found = study.records.compare(rows[3:], rows[:3])
    # t = 2 √3 at two degrees of freedom, whose p-value is 1 − t / √(2 + t²)
    t = 2 * math.sqrt(3)
    assert found.mean == pytest.approx(-0.02)
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.half_width == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)
    assert found.verdict == "noise"
    assert (found.system, found.control, found.pairs) == ("mHC", "vanilla", 3)
    for degrees, quantile in ((1, 12.7062), (3, 3.18245), (4, 2.77645), (10, 2.22814)):
        assert study.records.student_quantile(degrees) == pytest.approx(quantile, rel=1e-5)
    with pytest.raises(ValueError, match="nothing can be paired"):
        study.records.compare(rows_of(study, {("mHC", 2e-3, 0): 1.0}, corpus="another"), rows[:3])
    with pytest.raises(ValueError, match="two runs for one pair"):
        study.records.compare([*rows[3:], rows[3]], rows[:3])


def test_the_summary_compares_best_rates_with_the_control(study):
    losses = {("vanilla", 2e-3, seed): 2.0 for seed in range(3)} | {("vanilla", 1e-3, 0): 2.5}
    losses |= {("mHC", 1e-3, seed): 1.9 + 0.001 * seed for seed in range(3)} | {("mHC", 4e-3, 0): math.nan}
    losses |= {("MoDA row 3", 1e-3, 0): math.nan}
    rows = rows_of(study, losses)
    *_, vanilla, mhc, moda = study.report.summary(rows).splitlines()
    # in the order of the systems, not of the rows
    assert vanilla.startswith("| vanilla | 0.00M | 0.001: 2.5000, 0.002: **2.0000** |")
    assert mhc.startswith("| mHC | 0.00M | 0.001: **1.9000**, 0.004: nan | 0.9500 |")
    assert "| -0.0990 | ± 0.0025 |" in mhc and mhc.endswith("| 3 | better |")
    assert moda.endswith("| diverged |")
    # another batch is another table
    others = rows_of(study, {("vanilla", 2e-3, 0): 1.0}, batch=7)
    assert study.report.summary([*rows, *others]).count("| system |") == 2


def test_rows_survive_their_file(study, tmp_path):
    rows = rows_of(study, {("vanilla", 1e-3, 0): 1.25, ("mHC", 2e-3, 0): math.nan}, embedding_std=None)
    for row in rows:
        study.records.append_row(tmp_path / "runs.csv", row)
    first, second = study.records.read_rows([tmp_path / "runs.csv", tmp_path / "runs.csv"])
    assert first == rows[0] and second.diverged and second.key == rows[1].key
    (tmp_path / "other.csv").write_text("key,loss\n")
    with pytest.raises(ValueError, match=r"other\.csv"):
        study.records.read_rows([tmp_path / "other.csv"])


def test_rates_rise_and_fall(study):
    recipe = study.training.Recipe(tokens=100 * 64 * 1024, rate=2.0, warm_up=0.1, last=0.25)
    rates = [recipe.rate_at(step) for step in range(recipe.steps)]
    assert recipe.steps == 100 and rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(1.25) and rates[-1] == pytest.approx(0.5, rel=0.01)


def test_what_is_asked_for_and_impossible_is_refused(study, corpus):
    with pytest.raises(ValueError, match="execution='graph'"):
        study.training.Trainer(tiny_run(study), corpus, "cpu", "graph")
    with pytest.raises(ValueError, match="vocab_size=2048"):
        study.training.Trainer(replace(tiny_run(study), vocab_size=2048), corpus, "cpu")


def test_the_command_writes_a_line_for_each_run_and_skips_what_is_finished(study, tmp_path, capsys, monkeypatch):
    # threads would wait for each other where the machine has other work
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_packages(tmp_path / "source", count=4, lines=200)
    command = ["--plan", "tiny", "--device", "cpu", "--systems", "vanilla", "AttnRes block", "--out"]
    command += [str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--source", str(tmp_path / "source")]
    study.__main__.main([*command, "--results", str(tmp_path / "none")])
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["system"] for row in rows] == ["vanilla", "AttnRes block"]
    assert all(float(row["loss"]) < math.log(512) for row in rows)
    details = [json.loads(line) for line in (tmp_path / "out" / "details.jsonl").read_text().splitlines()]
    assert [each["key"] for each in details] == [row["key"] for row in rows]
    assert details[0]["depth_weights"] is None and len(details[1]["depth_weights"]["mean"]) == 9
    # also where they were committed after an earlier command
    (tmp_path / "results").mkdir()
    (tmp_path / "out" / "runs.csv").rename(tmp_path / "results" / "first.csv")
    capsys.readouterr()
    study.__main__.main([*command, "--results", str(tmp_path / "results")])
    assert "All runs of the plan are finished." in capsys.readouterr().out
    assert not (tmp_path / "out" / "runs.csv").exists()


def test_the_worker_takes_what_the_command_sends(study, corpus, tmp_path):
    run = tiny_run(study)
    assert study.training.Run.from_dict(json.loads(json.dumps(asdict(run)))) == run
    job = {
        "run": asdict(run),
        "corpus": str(Path(corpus.train.filename).parent),
        "checkpoints": None,
        "models": str(tmp_path / "models"),
        "device": "cpu",
        "execution": "eager",
        "deadline": 0.0,
    }
    assert "nothing is kept" in study.worker.answer(job)["paused"]
    assert "execution='compiled'" in study.worker.answer(job | {"execution": "compiled"})["failed"]
    assert study.worker.answer(job | {"deadline": None})["outcome"]["steps"] == 12
    folder = tmp_path / "models" / run.key
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert saved.config.model_type == "depth_qwen3" and saved.dtype is torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(folder)) == run.vocab_size == saved.config.vocab_size
    static = tiny_run(study, "Depth-Attention static")
    assert (
        "StaticRouting, which cannot be saved"
        in study.worker.answer(job | {"run": asdict(static), "deadline": None})["failed"]
    )
