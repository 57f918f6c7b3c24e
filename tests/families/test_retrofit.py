# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Vanilla checkpoints as retrofits: which gradients there are at the start, that training leaves it, and what survives.
That every pair starts with the function of its source is checked in `test_every_pair.py`.
"""

import copy

import pytest
import torch
from family_models import BACKBONE_FIELDS, DENSE_SOURCES, TINY, ids_of, wake
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from depthmix import optimizer_groups
from depthmix.configuration.depth_backbones import BACKBONES
from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.modeling.mixing_modules import MixingModule


# by method, the options of other forms of it
OPTIONS = {
    "depth_attention": {"depth_stride": 1},
    "attnres": {"attnres_variant": "cumulative", "attnres_block_size": 2, "attnres_recency_bias": True},
    "denseformer": {"dwa_dilation": 2},
    "mhc": {"mhc_num_streams": 3},
    "moda": {"moda_attn_depth_proj": True, "moda_depth_window": 3},
    "value_residual": {},
}
# Parameters behind a factor of zero get a gradient after the first step: projections of slots behind their gates,
# gains behind queries, and of connections what stands behind the projection.
BEHIND = {
    "attnres": ("_mixer.norm.weight",),
    "moda": ("_depth_kv_proj.weight",),
    "mhc": ("norm_weight", "alpha_pre", "alpha_post", "alpha_residual"),
}
# those of the first sub-layer have nothing to mix
NEVER = {"attnres": ("layers.0.attn_mixer.",), "mhc": ("layers.0.attn_connection.",)}
BY_METHOD = pytest.mark.parametrize("method", OPTIONS)


@pytest.fixture
def vanilla(tmp_path):
    """`vanilla(source)` saves an awake vanilla model of this backbone, and gives its folder."""

    def vanilla(source, dtype=torch.float32):
        head = BACKBONES[source].stock_class("ForCausalLM")
        torch.manual_seed(0)
        fields = TINY | BACKBONE_FIELDS[source] | DENSE_SOURCES.get(source, {})
        model = wake(head(head.config_class(**fields)))
        model.to(dtype).save_pretrained(tmp_path / "vanilla")
        return tmp_path / "vanilla"

    return vanilla


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def own_parameters(model, vanilla_folder):
    known = load(vanilla_folder).state_dict()
    return {name: parameter for name, parameter in model.named_parameters() if name not in known}


def train(model, steps, lr=1e-4, mixing_lr=1e-2):
    """Losses, and of the first two steps which gradients are zero."""
    optimizer = torch.optim.AdamW(optimizer_groups(model.train(), lr, mixing_lr, weight_decay=0.1))
    losses, zero = [], []
    for step in range(steps):
        ids = ids_of(4, 16, seed=step % 3)
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if step < 2:
            zero.append({n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()})
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses, zero


@pytest.mark.once
@BY_METHOD
@torch.no_grad()
def test_text_in_bf16(method, vanilla, tmp_path):
    """What is kept to the last bit gives the same text; the others, whose sums have another order, the same loss."""
    folder = vanilla("qwen3", torch.bfloat16)
    options = {"attnres_routing": "additive"} if method == "attnres" else {}
    convert(folder, tmp_path / "converted", to=method, progress=False, **options)
    models = [load(each, dtype=torch.bfloat16) for each in (tmp_path / "converted", folder)]
    ids = ids_of(2, 8)
    if method == "mhc":
        losses = [model(ids_of(4, 100), labels=ids_of(4, 100)).loss for model in models]
        assert abs(losses[0] - losses[1]) < 2e-2 * losses[1]
        return
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(model.generate(ids, **options) for model in models))


@pytest.mark.once
@BY_METHOD
def test_gradients_and_movement(method, vanilla, tmp_path):
    source = "olmo2" if method == "moda" else "qwen3"
    folder = vanilla(source)
    convert(folder, tmp_path / "converted", to=method, progress=False)
    model = load(tmp_path / "converted")
    own = own_parameters(model, folder)
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    assert own
    losses, zero = train(model, 20)

    def among(names, parts):
        return {name for name in names if any(part in name for part in parts)}

    never = among(own, NEVER.get(method, ()))
    assert zero[0] & own.keys() - never == among(own, BEHIND.get(method, ())) - never
    assert zero[1] & own.keys() - never == set()
    moved = {name: (parameter - before[name]).abs().max().item() for name, parameter in own.items()}
    projections = among(own, ("_depth_kv_proj.weight",))
    assert min(moved[name] for name in own.keys() - never - projections) > 1e-3
    assert all(moved[name] > 1e-4 for name in projections)
    assert losses[-1] < losses[0]


@BY_METHOD
@torch.no_grad()
def test_other_forms_and_what_changes_the_function(method, vanilla, tmp_path):
    folder, ids = vanilla("qwen3"), ids_of(2, 14)
    options = {"to": method, "progress": False}
    report = convert(folder, tmp_path / "other", retrofit=True, **options, **OPTIONS[method])
    expected = load(folder)(ids).logits
    assert report.retrofit and (load(tmp_path / "other")(ids).logits - expected).abs().max() <= 1e-5
    if method == "attnres":
        assert load(tmp_path / "other").config.attnres_routing == "additive"
    # the form of the paper, which the report names
    report = convert(folder, tmp_path / "published", retrofit=False, **options)
    assert report.retrofit is False and "It starts as the method was published" in str(report)
    changes = (load(tmp_path / "published")(ids).logits - expected).abs().max()
    assert (changes > 1e-3) == (method in ("depth_attention", "moda", "value_residual"))
    with pytest.raises(ConversionError, match=r"^retrofit=True: must keep the function of the source, which is lost"):
        convert(folder, tmp_path / "no", retrofit=True, **options, **LOSING[method])
    with pytest.raises(ConversionError, match=r"^retrofit='yes': must be True, False or None"):
        convert(folder, tmp_path / "no", retrofit="yes", **options)
    assert not (tmp_path / "no").exists()


# options that a retrofit cannot have; of some methods there is none but another order of key norm and rotation
LOSING = {
    "depth_attention": {"num_loops": 2},
    "attnres": {"attnres_scale": "mean"},
    "denseformer": {"key_norm_position": "after_rope"},
    "mhc": {"key_norm_position": "after_rope"},
    "moda": {"moda_gate": False},
    "value_residual": {"value_residual_init": "equal"},
}


@torch.no_grad()
def test_slots_start_as_copies_of_keys_and_values(vanilla, tmp_path):
    folder = vanilla("qwen2")
    options = {"to": "moda", "moda_attn_depth_proj": True, "progress": False}
    convert(folder, tmp_path / "converted", dtype="bfloat16", **options)
    tensors = load_file(tmp_path / "converted" / "model.safetensors")
    for i in range(3):
        own = torch.cat([tensors[f"model.layers.{i}.self_attn.{each}_proj.weight"] for each in "kv"])
        for site in ("attn", "mlp"):
            assert torch.equal(tensors[f"model.layers.{i}.{site}_depth_kv_proj.weight"], own)
    gates = {name: tensor for name, tensor in tensors.items() if "depth_gate" in name}
    assert len(gates) == 3
    assert all(gate.dtype is torch.float32 and gate.shape == (4,) and not gate.any() for gate in gates.values())
    # where a matrix to be copied is missing, it is named once
    broken = load_file(folder / "model.safetensors")
    del broken["model.layers.1.self_attn.k_proj.weight"]
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing"):
        convert(folder, tmp_path / "no", **options)


@torch.no_grad()
def test_gates_of_one_are_the_published_form(vanilla, tmp_path):
    """Bit for bit, with the same weights otherwise."""
    folder, ids = vanilla("qwen3"), ids_of(2, 40)
    for method in ("depth_attention", "moda"):
        dest = tmp_path / method
        convert(folder, dest, to=method, progress=False)
        for dtype in (torch.float32, torch.bfloat16):
            gated = load(dest, dtype=dtype)
            for name, parameter in gated.named_parameters():
                if "depth_gate" in name:
                    assert parameter.dtype is torch.float32
                    parameter.fill_(1)
            config = copy.deepcopy(gated.config)
            setattr(config, "moda_gate" if method == "moda" else "depth_gate", False)
            ungated = type(gated)._from_config(config, dtype=dtype).eval()
            ungated.load_state_dict({k: v for k, v in gated.state_dict().items() if "depth_gate" not in k})
            assert not [name for name, _ in ungated.named_parameters() if "depth_gate" in name]
            assert torch.equal(gated(ids).logits, ungated(ids).logits)


def test_inspect_says_it(vanilla):
    conversions = inspect_checkpoint(vanilla("qwen3")).conversions
    for method, outcome in conversions.items():
        assert "unless asked otherwise. It is a retrofit. The converted model computes" in outcome, method
    assert "depth_gate=True" in conversions["depth_attention"] and "moda_gate=True" in conversions["moda"]


@pytest.mark.parametrize("method", ["depth_attention", "attnres", "moda"])
def test_trained_gates_survive(method, vanilla, tmp_path):
    """Saving, loading in bf16, an adapter with its merge: what was trained is there, in fp32."""
    peft = pytest.importorskip("peft")
    folder, options = vanilla("qwen3"), {"attnres_routing": "additive"} if method == "attnres" else {}
    convert(folder, tmp_path / "converted", to=method, progress=False, **options)
    modules = {"attnres": ["attn_mixer", "mlp_mixer"]}.get(method, ["depth_gate"])
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], modules_to_save=modules)
    model = peft.get_peft_model(load(tmp_path / "converted", dtype=torch.bfloat16), lora)
    groups = optimizer_groups(model, 1e-4, 1e-2, weight_decay=0.1)
    trained = {id(p) for group in groups if group["lr"] == 1e-2 for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in trained]
    assert names and all(any(module in name for module in modules) for name in names)
    optimizer = torch.optim.AdamW(groups)
    for step in range(3):
        ids = ids_of(2, 12, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = model.merge_and_unload().eval()
    own = {
        f"{prefix}.{name}": parameter
        for prefix, module in merged.named_modules()
        if isinstance(module, MixingModule)
        for name, parameter in module.named_parameters(recurse=False)
    }
    assert all(parameter.dtype is torch.float32 for parameter in own.values())
    assert sum(parameter.detach().abs().max() > 1e-2 for parameter in own.values()) >= 3
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged", dtype=torch.bfloat16)
    for name, parameter in own.items():
        assert torch.equal(again.get_parameter(name), parameter)
    ids = ids_of(2, 12)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, merged(ids).logits)


def test_only_the_mixing_is_trained(vanilla, tmp_path):
    """With a frozen base the loss falls by the mixing alone."""
    folder = vanilla("qwen3")
    convert(folder, tmp_path / "converted", to="depth_attention", depth_stride=1, progress=False)
    model = load(tmp_path / "converted")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MixingModule):
            module.requires_grad_(True)
    (group,) = optimizer_groups(model, 1e-4, 1e-1)
    assert sum(p.numel() for p in group["params"]) == 3 * 2
    losses, _ = train(model, 15, mixing_lr=0.1)
    assert losses[12] < losses[0] - 1e-3


@pytest.mark.parametrize(
    ("method", "options"),
    [("value_residual", {"value_residual_learnable": False}), ("depth_attention", {"depth_stride": 0})],
)
def test_what_cannot_learn_is_no_retrofit(method, options, vanilla, tmp_path):
    report = convert(vanilla("qwen3"), tmp_path / "same", to=method, progress=False, **options)
    assert report.retrofit is False
    with pytest.raises(ConversionError, match="retrofit=True: must have parameters that training can move"):
        convert(vanilla("qwen3"), tmp_path / "asked", to=method, retrofit=True, progress=False, **options)
    assert not (tmp_path / "asked").exists()
