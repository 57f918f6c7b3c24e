# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Every method on every backbone: the vanilla function without mixing, caches, padding, checkpointing, saving, and a
training step against the reference.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from depthmix.configuration.depth_backbones import BACKBONES
from depthmix.conversion import convert
from depthmix.families import FAMILIES


CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
# fields that bring out what is peculiar to a backbone
BACKBONE_FIELDS = {
    "dense": {"head_dim": 16},
    "qwen3": {"head_dim": 24, "use_sliding_window": True, **SLIDING},
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6, "head_dim": 24},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, **SLIDING},
    "olmo2": {"attention_bias": True},
    "olmo3": SLIDING,
    "qwen3_moe": {"head_dim": 24, "moe_intermediate_size": 32, "mlp_only_layers": [1], **EXPERTS},
    "olmoe": {"clip_qkv": 1.0, **EXPERTS},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}
# with these fields a new model computes what its vanilla one does: bit for bit, or up to rounding
VANILLA_FIELDS = {
    "depth_attention": {"depth_stride": 0},
    "attnres": {"attnres_scale": "sum", "attnres_block_size": 3},
    "denseformer": {},
    "mhc": {"mhc_num_streams": 3},
    "moda": {"moda_attn_slots": False, "moda_ffn_slots": False},
    "value_residual": {"value_residual_init": "identity"},
}
ROUNDED = ("attnres", "mhc")
AWAKE_FIELDS = {
    "depth_attention": {"depth_stride": 2},
    "attnres": {"attnres_block_size": 3},
    "denseformer": {},
    "mhc": {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 3},
    "moda": {},
    "value_residual": {},
}
# the recurrence of Kimi Linear adds up in another order with a cache
# and the tied embeddings of SmolLM3 make large logits
TOLERANCE = {"llama": 5e-5, "kimi_linear": 5e-5, "qwen3_moe": 3e-5, "olmoe": 3e-5, "smollm3": 1e-4}
# one pair of each method on its first backbone is checked elsewhere in depth; these are all
EVERY_PAIR = pytest.mark.parametrize("pair", FAMILIES.values(), ids=FAMILIES)


# stock models that the backbone `dense` stands for, with what is peculiar to each
DENSE_SOURCES = {
    "qwen3": BACKBONE_FIELDS["qwen3"],
    "qwen2": BACKBONE_FIELDS["qwen2"],
    "llama": BACKBONE_FIELDS["llama"] | {"head_dim": 24},
}


def fields_of(pair):
    return TINY | BACKBONE_FIELDS[pair.backbone.model_type]


def new_model(pair, **fields):
    torch.manual_seed(0)
    return pair.find_class("ForCausalLM")(pair.find_class("Config")(**fields_of(pair) | fields)).eval()


def new_vanilla(pair):
    torch.manual_seed(0)
    head = pair.backbone.stock_class("ForCausalLM")
    fields = fields_of(pair)
    return head(head.config_class(**fields)).eval()


def wake(model):
    """Moves what starts at zero or one, so that a lost mixing or a wrong source would be noticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        # padding starts as zeros, on which norms without a norm before them multiply gradients by eps ** -0.5
        model.get_input_embeddings().weight[0].normal_(generator=generator)
    return model


@pytest.fixture
def awake(pair):
    return wake(new_model(pair, **AWAKE_FIELDS[pair.method]))


def ids_of(batch, length, seed=1):
    return torch.randint(3, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@EVERY_PAIR
def test_without_mixing_it_is_the_vanilla_model(pair):
    """From one seed: weights, logits, losses and gradients."""
    ours, stock = new_model(pair, **VANILLA_FIELDS[pair.method]), new_vanilla(pair)
    own = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        assert torch.equal(own[name], parameter), name
    assert {n for n, _ in stock.named_buffers()} == {n for n, _ in ours.named_buffers()}
    wake(stock)
    ours.load_state_dict(stock.state_dict(), strict=False)
    ids = ids_of(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    results = [each(ids, attention_mask=mask, labels=ids) for each in (ours, stock)]
    rounds = pair.method in ROUNDED or pair.backbone.has_experts
    tolerance = TOLERANCE.get(pair.backbone.model_type, 2e-5) if rounds else 0
    for name in ("logits", "loss", "aux_loss"):
        if getattr(results[1], name, None) is not None:
            torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name), atol=tolerance, rtol=0)
    if results[1].get("router_logits") is not None:
        assert len(results[0].router_logits) == len(results[1].router_logits)
    for result in results:
        result.loss.backward()
    for name, parameter in stock.named_parameters():
        assert (own[name].grad - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-9, name


@pytest.mark.once
@EVERY_PAIR
@torch.no_grad()
def test_mixing_matters(pair, awake):
    vanilla = new_vanilla(pair)
    state = awake.state_dict()
    vanilla.load_state_dict({name: state[name] for name in vanilla.state_dict()})
    ids = ids_of(2, 12)
    assert (awake(ids).logits - vanilla(ids).logits).abs().max() > 0.05


@pytest.mark.once
@EVERY_PAIR
@torch.no_grad()
def test_cached_equals_uncached(pair, awake):
    ids, cache = ids_of(2, 14), DynamicCache(config=awake.config)
    chunks = [
        awake(chunk, use_cache=True, **{CACHE_NAME: cache}).logits for chunk in ids.split([7, 4, 1, 1, 1], dim=1)
    ]
    tolerance = TOLERANCE.get(pair.backbone.model_type, 2e-5)
    torch.testing.assert_close(torch.cat(chunks, dim=1), awake(ids, use_cache=False).logits, atol=tolerance, rtol=0)


@pytest.mark.once
@EVERY_PAIR
@torch.no_grad()
def test_padded_equals_unpadded(pair, awake):
    rows = [ids_of(1, 3), ids_of(1, 10, seed=2)]
    ids = torch.cat([nn.functional.pad(row, (10 - row.shape[1], 0)) for row in rows])
    mask = (torch.arange(10) >= torch.tensor([[7], [0]])).long()
    # rotated keys meet queries of layers that do not rotate there, so that positions have to be the real ones
    is_absolute = pair.model_type == "depth_smollm3"
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if is_absolute else {}
    logits = awake(ids, attention_mask=mask, **positions).logits
    tolerance = TOLERANCE.get(pair.backbone.model_type, 2e-5)
    for b, row in enumerate(rows):
        torch.testing.assert_close(logits[b, -row.shape[1] :], awake(row).logits[0], atol=tolerance, rtol=0)


@pytest.mark.once
@EVERY_PAIR
def test_checkpointed_gradients_are_the_plain_ones(pair, awake):
    ids, awake = ids_of(2, 10), awake.train()
    plain = torch.autograd.grad(awake(ids, labels=ids, use_cache=False).loss, list(awake.parameters()))
    # the name since transformers 5.24
    enable = getattr(awake, "activation_checkpointing_enable", None) or awake.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    again = torch.autograd.grad(awake(ids, labels=ids, use_cache=False).loss, list(awake.parameters()))
    for (name, _), one, other in zip(awake.named_parameters(), plain, again, strict=True):
        # with Attention Residuals every layer then mixes for itself, in another order
        noise = 1e-5 * one.norm() if pair.method == "attnres" else 0
        assert (one - other).norm() <= noise, name


@pytest.mark.once
@EVERY_PAIR
def test_a_training_step_equals_the_reference(pair, awake):
    """The reference is the same model in double precision, in pure PyTorch."""
    ids = ids_of(2, 10)
    exact = new_model(pair, **AWAKE_FIELDS[pair.method], depth_impl="reference").double()
    exact.load_state_dict(awake.state_dict())
    if pair.backbone.has_experts:
        exact.set_experts_implementation("eager")
    # one step of plain gradient descent
    for model in (awake, exact):
        model(ids, labels=ids, use_cache=False, output_router_logits=False).loss.backward()
    for (name, parameter), other in zip(awake.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad - other.grad).norm() <= 2e-3 * other.grad.norm() + 1e-6, name


@EVERY_PAIR
@torch.no_grad()
def test_reloaded_is_the_original(pair, awake, tmp_path):
    awake.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(awake) and loaded.config.to_dict() == awake.config.to_dict() | {
        "_name_or_path": loaded.config.to_dict().get("_name_or_path"),
    } | {key: loaded.config.to_dict().get(key) for key in ("auto_map", "architectures", "dtype")}
    ids = ids_of(2, 9)
    assert torch.equal(loaded(ids).logits, awake(ids).logits)
    for model in (loaded, awake):
        # with it, transformers 5.16 cannot generate with the stock models either
        model.config.output_router_logits = False
    texts = [m.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None) for m in (loaded, awake)]
    assert torch.equal(*texts)


# on the oldest transformers, one method over all backbones, and each method once
CONVERSIONS = [
    pytest.param(
        pair,
        source,
        id=f"{pair.model_type}-{source}",
        marks=[] if pair.method == "attnres" or source == "llama" else [pytest.mark.once],
    )
    for pair in FAMILIES.values()
    for source in (DENSE_SOURCES if pair.backbone.model_type == "dense" else [pair.backbone.model_type])
]


@pytest.mark.parametrize(("pair", "source"), CONVERSIONS)
@torch.no_grad()
def test_converted_from_vanilla(pair, source, tmp_path):
    stock = BACKBONES[source]
    head = stock.stock_class("ForCausalLM")
    torch.manual_seed(0)
    vanilla = wake(head(head.config_class(**TINY | BACKBONE_FIELDS[source] | DENSE_SOURCES.get(source, {})))).eval()
    vanilla.save_pretrained(tmp_path / "vanilla", max_shard_size="100KB")
    options = {"to": pair.method, "progress": False}
    report = convert(tmp_path / "vanilla", tmp_path / "same", **options)
    assert report.target == pair.model_type and report.retrofit is True
    assert "start:    It is a retrofit." in str(report)
    assert "It is a retrofit." in (tmp_path / "same" / "README.md").read_text()
    loaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "same", output_loading_info=True)
    assert not any(loading.values()) and loaded.config.model_type == pair.model_type
    ids = ids_of(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for given in ({"attention_mask": mask}, {}):
        expected = vanilla(ids, **given).logits
        # with tied embeddings logits are many times as large as others
        rounds = pair.method in ROUNDED or pair.backbone.has_experts
        tolerance = max(1e-5, 1e-6 * expected.abs().max().item()) if rounds else 0
        torch.testing.assert_close(loaded.eval()(ids, **given).logits, expected, atol=tolerance, rtol=0)
    # as it was published, and by its model type; saving again gives the same tensors
    convert(tmp_path / "vanilla", tmp_path / "published", retrofit=False, **options | {"to": pair.model_type})
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    if pair.method in ("depth_attention", "moda", "value_residual"):
        assert (published(ids).logits - expected).abs().max() > 0.02
    published.save_pretrained(tmp_path / "again")
    files = [load_file(file) for name in ("published", "again") for file in (tmp_path / name).glob("*.safetensors")]
    assert len(files) == 2 and files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
