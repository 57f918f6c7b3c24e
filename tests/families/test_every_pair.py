# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Every method on every backbone: the vanilla function without mixing, caches, padding, checkpointing, saving, and a
training step against the reference.
"""

import ast
import inspect
import textwrap

import pytest
import torch
from family_models import (
    AWAKE_FIELDS,
    BACKBONE_FIELDS,
    CACHE_NAME,
    DENSE_SOURCES,
    ROUNDED,
    TINY,
    TOLERANCE,
    VANILLA_FIELDS,
    ids_of,
    new_model,
    new_vanilla,
    wake,
)
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthmix.configuration.depth_backbones import BACKBONES
from depthmix.conversion import convert
from depthmix.families import FAMILIES


# one pair of each method on its first backbone is checked elsewhere in depth; these are all
EVERY_PAIR = pytest.mark.parametrize("pair", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture
def awake(pair):
    return wake(new_model(pair, **AWAKE_FIELDS[pair.method]))


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
def test_servers_find_the_attention(pair):
    """
    By the text of its forward vLLM finds out whether it can put an attention of its own there: it wants one call of a
    function that was looked up, and its scaling as an attribute.
    """
    attention = pair.find_class("DecoderLayer").attention_class
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(attention.forward))))
    looked_up = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(")
    }
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in looked_up)
    assert [ast.unparse(each.value) for each in call.keywords if each.arg == "scaling"] == ["self.scaling"]


@pytest.mark.once
@pytest.mark.parametrize("method", ["depth_attention", "value_residual", "moda"])
@pytest.mark.parametrize("query_heads, key_heads", [(2, 0.5), (2, 1.5), (1, 1), (4, 1)])
def test_parts_of_a_group_of_heads_are_refused(method, query_heads, key_heads):
    """As on a device that shares the attention with more others than there are key-value heads."""
    pair = next(each for each in FAMILIES.values() if (each.method, each.backbone.model_type) == (method, "qwen3"))
    model = new_model(pair)
    attention = model.base_model.layers[1].self_attn
    for name, heads in (("q_proj", query_heads), ("k_proj", key_heads), ("v_proj", key_heads)):
        setattr(attention, name, nn.Linear(TINY["hidden_size"], int(heads * attention.head_dim), bias=False))
    message = f"num_key_value_heads=2: must be a multiple.* here are {query_heads:g} query heads and {key_heads:g} key"
    with pytest.raises(ValueError, match=message):
        model(ids_of(1, 4))


@pytest.mark.once
@pytest.mark.parametrize("method", ["attnres", "depth_attention", "value_residual"])
def test_outputs_of_some_heads_are_refused(method, monkeypatch):
    """As of a server that divides the heads of a model which has all of them everywhere."""
    pair = next(each for each in FAMILIES.values() if each.method == method)
    model = new_model(pair)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "half", lambda module, query, *args, **kwargs: (query[:, :2], None))
    model.set_attn_implementation("half")
    with pytest.raises(ValueError, match="outputs of the attention for .* numbers of the query.*tensor parallelism"):
        model(ids_of(1, 4))


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
def test_layers_do_not_run_on_hidden_states_alone(pair, awake):
    """
    As calibration of quantisers has them run that goes from layer to layer: it would go on with wrong numbers. What
    the model itself hands on is enough, and neither less nor more.
    """
    calls, refused = [], 0
    for layer in awake.base_model.layers:
        layer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    awake(ids_of(2, 7), use_cache=False)
    for layer, (hidden_states, *handed_on), kwargs, output in calls[: len(awake.base_model.layers)]:
        torch.testing.assert_close(layer(hidden_states, *handed_on, **kwargs), output, rtol=0, atol=0)
        if handed_on:
            refused += 1
            for fewer in ((), *([handed_on[:-1]] if pair.method != "moda" else [])):
                with pytest.raises(RuntimeError, match=rf"Layer {layer.layer_idx} got \d+ tensors? of earlier layers"):
                    layer(hidden_states, *fewer, **kwargs)
        elif pair.method not in ("moda", "mhc"):
            with pytest.raises((RuntimeError, TypeError), match="got 1 tensor|takes"):
                layer(hidden_states, hidden_states, **kwargs)
    assert bool(refused) == (pair.method != "mhc")


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
        tolerance = max(1e-5, 2e-6 * expected.abs().max().item()) if rounds else 0
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
