# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What every causal language model of this package must do inside transformers, whatever it mixes: caches, padding,
packing, generation, attention implementations, outputs, no state between calls.

A family subclasses `CausalLMChecks` and, where its configuration differs, overrides the fixtures `build` and
`assert_awake`.
"""

import copy
import gc
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    Qwen3Config,
    StaticCache,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


CACHE_NAMES = ("cache", "past_key_values")
HOST_CACHE_NAME = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
ignore_flex_warnings = pytest.mark.filterwarnings(
    # transformers asks torch for the mask in a way that is going to be removed
    "ignore:_compile flag on create_block_mask:DeprecationWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
)
# fields of a variant that change what transformers does for the model
HOST_FIELDS = {"layer_types", "use_sliding_window", "use_qk_norm"}
GREEDY = {"do_sample": False, "eos_token_id": None}


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def assert_trains_and_decodes_alike(model, expected, ids, noise=0.0):
    """In logits, gradients, which may be off by so much `noise` besides, and decoding in chunks."""
    results = []
    for each in (expected, model):
        outputs = each(ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        results.append(outputs.logits)
    assert_close(*results)
    for name, parameter in model.named_parameters():
        gradient = expected.get_parameter(name).grad
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm() + noise, name
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(chunk, **{HOST_CACHE_NAME: cache}).logits for chunk in ids.split([6, 1, 2], dim=1)]
    assert_close(torch.cat(steps, dim=1), results[0])


def new_cache(model, kind="dynamic"):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=64)
    return DynamicCache(config=model.config)


def in_chunks(model, ids, chunks, *, kind="dynamic"):
    """Logits of ids that are given chunk by chunk."""
    cache = new_cache(model, kind)
    return torch.cat(
        [model(chunk, use_cache=True, **{HOST_CACHE_NAME: cache}).logits for chunk in ids.split(chunks, dim=1)], dim=1
    )


def num_layers(model):
    """Those of all passes of a looped model."""
    return model.config.num_hidden_layers * getattr(model.config, "num_loops", 1)


def lengths(cache):
    return [cache.get_seq_length(layer) for layer in range(len(cache.layers))]


def greedy_without_cache(model, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def left_padded(rows):
    """Ids and mask of rows `[1, n]` of different lengths."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    return ids, mask


def next_token_loss(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class CausalLMChecks:
    # name -> fields of the configuration
    variants: ClassVar[dict[str, dict]] = {"default": {}}
    # whether the variants that change what transformers does run on its oldest version too
    has_host_variants: ClassVar[bool] = False
    # the attention implementations that the family accepts
    attentions: ClassVar[tuple[str, ...]] = ("eager", "sdpa", "flex_attention")
    # those of the variants whose logits change when all positions shift
    absolute_variants: ClassVar[set[str]] = set()
    # those of them that run with no other attention than that of transformers
    looped_variants: ClassVar[set[str]] = set()
    # name of a module that has nothing to mix, so that its gradient is zero, or nothing but rounding
    idle_module: ClassVar[str | None] = None
    sequence_classification_class: ClassVar[type]
    found_awake: ClassVar[set] = set()

    def pytest_generate_tests(self, metafunc):
        if "variant" in metafunc.fixturenames:
            # on the oldest transformers, one for all that differ in the method only; those that differ in what the
            # host does with one method, since all methods share the forward, the attention and the masks
            first, *others = self.variants
            on_oldest = [
                name for name in others if self.has_host_variants and self.variants[name].keys() & HOST_FIELDS
            ]
            # what comes from the host's `generate` and from Python meets the first and the last
            sampled = others[:-1] if metafunc.definition.get_closest_marker("sampled_variants") else []
            marks = {name: [] if name in on_oldest else [pytest.mark.once] for name in others}
            for name in sampled:
                marks[name].append(pytest.mark.exhaustive)
            cases = [pytest.param(name, marks=marks[name]) for name in others]
            metafunc.parametrize("variant", [first, *cases])
        if "any_attention" in metafunc.fixturenames:
            metafunc.parametrize("any_attention", self.attentions)

    @staticmethod
    def first_state(model, embeddings):
        """What the first layer gets."""
        return embeddings

    @pytest.fixture
    def model(self, build, assert_awake, variant):
        model = build(**self.variants[variant])
        # a variant is built anew for each check, and always the same
        if (type(self), variant) not in self.found_awake:
            assert_awake(model)
            self.found_awake.add((type(self), variant))
        return model

    @pytest.fixture
    def attention(self, any_attention):
        # flex attention in its unfused form, since its kernels for CPUs take minutes to compile
        with torch.compiler.set_stance("force_eager"):
            yield any_attention

    def num_depth_columns(self, model, layer):
        """How many columns the attention weights of a layer have besides those of the tokens."""
        return 0

    @pytest.fixture
    def has_sliding_layers(self, model):
        return "sliding_attention" in (getattr(model.config, "layer_types", None) or ())

    # the cache argument

    @torch.no_grad()
    @pytest.mark.parametrize("name", CACHE_NAMES)
    def test_greedy_steps_equal_uncached(self, model, token_ids, name):
        ids, cache = token_ids(2, 12), new_cache(model)
        outputs = model(ids, use_cache=True, **{name: cache})
        for step in range(16):
            assert lengths(cache) == [12 + step] * num_layers(model)
            assert outputs.get(HOST_CACHE_NAME) is cache
            assert_close(outputs.logits[:, -1], model(ids, use_cache=False).logits[:, -1])
            new = outputs.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], dim=1)
            outputs = model(new, use_cache=True, **{name: cache})

    @torch.no_grad()
    @pytest.mark.parametrize("name", CACHE_NAMES)
    def test_base_model_uses_a_cache_of_either_name(self, model, token_ids, name):
        ids, base, cache = token_ids(2, 9), model.base_model, new_cache(model)
        base(ids[:, :5], use_cache=True, **{name: cache})
        hidden = base(ids[:, 5:], use_cache=True, **{name: cache}).last_hidden_state
        assert lengths(cache) == [9] * num_layers(model)
        assert_close(hidden, base(ids).last_hidden_state[:, 5:])

    @torch.no_grad()
    def test_cache_given_by_position(self, model, token_ids):
        ids, cache = token_ids(2, 9), new_cache(model)
        model(ids[:, :5], None, None, cache, use_cache=True)
        assert_close(model(ids[:, 5:], None, None, cache, use_cache=True).logits, model(ids).logits[:, 5:])

    def test_two_different_caches_are_refused(self, model, token_ids):
        ids, cache = token_ids(1, 3), new_cache(model)
        for each in (model, model.base_model):
            with pytest.raises(ValueError, match="`cache` and `past_key_values` are two names of one argument"):
                each(ids, cache=cache, past_key_values=new_cache(model))
        model(ids, cache=cache, past_key_values=cache)
        assert lengths(cache) == [3] * num_layers(model)

    def test_signature_shows_the_name_of_the_host_library(self, model):
        hidden_name = next(name for name in CACHE_NAMES if name != HOST_CACHE_NAME)
        for each in (type(model), type(model.base_model), self.sequence_classification_class):
            parameters = inspect.signature(each.forward).parameters
            assert HOST_CACHE_NAME in parameters and hidden_name not in parameters
            # a compiler binds by the function's own signature, and a server reads the innermost function's source
            assert "__signature__" not in vars(each.forward)
            assert f"def {each.forward.__name__}(" in inspect.getsource(inspect.unwrap(each.forward))
            # `generate` and the Trainer look for these
            assert {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"} <= set(parameters)
        assert {"labels", "logits_to_keep"} <= set(inspect.signature(type(model).forward).parameters)

    @pytest.mark.parametrize("training", [False, True])
    def test_cache_does_not_change_the_function(self, model, token_ids, training):
        ids = token_ids(2, 20)
        model.train(training)
        plain = model(ids, use_cache=False)
        assert plain.get(HOST_CACHE_NAME) is None
        assert_close(model(ids, use_cache=True).logits, plain.logits)
        for kind in ("dynamic", "static"):
            with torch.set_grad_enabled(training and kind == "dynamic"):
                cache = new_cache(model, kind)
                assert_close(model(ids, use_cache=True, **{HOST_CACHE_NAME: cache}).logits, plain.logits)

    def test_cache_does_not_change_the_gradients(self, model, token_ids):
        ids = token_ids(2, 10)
        with_cache, without = (
            torch.autograd.grad(model(ids, labels=ids, use_cache=use).loss, list(model.parameters()))
            for use in (True, False)
        )
        for one, other in zip(with_cache, without, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()

    # several tokens on top of a filled cache

    @torch.no_grad()
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @pytest.mark.parametrize("chunks", [[7, 1, 16], [24], [1] * 24])
    def test_chunks_equal_one_pass(self, model, token_ids, chunks, kind):
        ids = token_ids(2, 24)
        changed = ids.clone()
        changed[:, 20] = (changed[:, 20] + 1) % 90 + 3
        logits = in_chunks(model, ids, chunks, kind=kind)
        assert_close(logits, model(ids, use_cache=False).logits)
        # causality, to the last bit
        changed_logits = in_chunks(model, changed, chunks, kind=kind)
        assert torch.equal(changed_logits[:, :20], logits[:, :20])
        assert (changed_logits[:, 20:] - logits[:, 20:]).abs().amax(-1).min() > 1e-3

    @torch.no_grad()
    def test_static_cache_decodes_like_a_dynamic_one(self, model, token_ids):
        ids = token_ids(2, 21)
        chunks = [5] + [1] * 16
        assert_close(in_chunks(model, ids, chunks, kind="static"), in_chunks(model, ids, chunks))

    @torch.no_grad()
    def test_cropped_cache_is_used_again(self, model, token_ids, has_sliding_layers):
        ids, other, cache = token_ids(2, 16), token_ids(2, 4, seed=5), new_cache(model)
        model(ids[:, :12], use_cache=True, **{HOST_CACHE_NAME: cache})
        if has_sliding_layers:
            cache.activate_past_recording()
        model(ids[:, 12:], use_cache=True, **{HOST_CACHE_NAME: cache})
        cache.crop(-4)
        logits = model(other, use_cache=True, **{HOST_CACHE_NAME: cache}).logits
        assert_close(logits, model(torch.cat([ids[:, :12], other], dim=1)).logits[:, 12:])

    @torch.no_grad()
    def test_rows_of_a_cache_are_reordered_and_repeated(self, model, token_ids):
        ids, new = token_ids(2, 8), token_ids(3, 2, seed=5)
        cache = new_cache(model)
        model(ids, use_cache=True, **{HOST_CACHE_NAME: cache})
        rows = torch.tensor([1, 1, 0])
        cache.reorder_cache(rows)
        logits = model(new, use_cache=True, **{HOST_CACHE_NAME: cache}).logits
        assert_close(logits, model(torch.cat([ids[rows], new], dim=1)).logits[:, 8:])

        cache = new_cache(model)
        model(ids[:1], use_cache=True, **{HOST_CACHE_NAME: cache})
        cache.batch_repeat_interleave(3)
        logits = model(new[:1].expand(3, -1), use_cache=True, **{HOST_CACHE_NAME: cache}).logits
        single = model(torch.cat([ids[:1], new[:1]], dim=1)).logits[:, 8:]
        assert_close(logits, single.expand(3, -1, -1))

    @torch.no_grad()
    @pytest.mark.skipif(
        "fp8" not in (QuantizedCache.__doc__ or ""), reason="this transformers has no quantised cache of its own"
    )
    def test_quantised_cache(self, model, vanilla_twin, token_ids, has_sliding_layers):
        if has_sliding_layers:
            with pytest.raises(ValueError, match="only full attention layers"):
                QuantizedCache(backend="fp8", config=model.config)
            return
        errors = []
        for each in (model, vanilla_twin(model)):
            ids, cache = token_ids(2, 16), QuantizedCache(backend="fp8", config=each.config)
            logits = torch.cat(
                [each(chunk, use_cache=True, **{HOST_CACHE_NAME: cache}).logits for chunk in ids.split(8, dim=1)],
                dim=1,
            )
            exact = each(ids).logits
            errors.append((logits - exact).norm(dim=-1) / exact.norm(dim=-1))
        # the prompt itself is read as it was, what follows reads rounded keys and values
        assert errors[0][:, :8].max() < 1e-5
        assert 1e-3 < errors[0][:, 8:].mean() < 2 * errors[1][:, 8:].mean()

    # padding and packing

    @ignore_flex_warnings
    @torch.no_grad()
    def test_left_padding(self, model, variant, token_ids, attention):
        model.set_attn_implementation(attention)
        rows = [token_ids(1, 3), token_ids(1, 10, seed=2)]
        ids, mask = left_padded(rows)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cases = [{"position_ids": positions}]
        if variant not in self.absolute_variants:
            cases.append({})
        for given in cases:
            logits = model(ids, attention_mask=mask, **given).logits
            assert logits.isfinite().all()
            for b, row in enumerate(rows):
                assert_close(logits[b, -row.shape[1] :], model(row).logits[0])
            rubbish = torch.where(mask.bool(), ids, token_ids(2, 10, seed=3))
            real = model(rubbish, attention_mask=mask, **given).logits[mask.bool()]
            assert torch.equal(real, logits[mask.bool()])

    @torch.no_grad()
    def test_right_padding(self, model, token_ids):
        rows = [token_ids(1, 3), token_ids(1, 10, seed=2)]
        ids, mask = left_padded(rows)
        ids[0], mask[0] = ids[0].roll(3), mask[0].roll(3)
        logits = model(ids, attention_mask=mask).logits
        assert logits.isfinite().all()
        for b, row in enumerate(rows):
            assert_close(logits[b, : row.shape[1]], model(row).logits[0])

    def test_left_padding_while_generating(self, model, token_ids):
        rows = [token_ids(1, 3), token_ids(1, 10, seed=2)]
        ids, mask = left_padded(rows)
        for cache in ("dynamic", "static"):
            generated = model.generate(
                ids, attention_mask=mask, max_new_tokens=8, cache_implementation=cache, **GREEDY
            )
            for b, row in enumerate(rows):
                alone = model.generate(row, max_new_tokens=8, **GREEDY)
                assert generated[b, -8:].tolist() == alone[0, -8:].tolist()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_everything_stays_finite_with_padding(self, model, token_ids, attention, dtype):
        model.set_attn_implementation(attention)
        model.to(dtype)
        ids, mask = left_padded([token_ids(1, 6), token_ids(1, 10, seed=2)])
        labels = ids.masked_fill(mask == 0, -100)
        outputs = model(ids, attention_mask=mask, labels=labels)
        assert outputs.logits.dtype is dtype
        assert outputs.logits.isfinite().all()
        outputs.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name

    @ignore_flex_warnings
    @pytest.mark.parametrize("documents", [(5, 5), (1, 9), (3, 3, 4)])
    def test_packed_documents(self, model, token_ids, attention, documents):
        model.set_attn_implementation(attention)
        ids = token_ids(1, 10)
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        # flex attention has no backward on CPUs
        differentiable = attention != "flex_attention"
        with torch.set_grad_enabled(differentiable):
            logits = model(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits
        with torch.no_grad():
            alone = [model(document).logits for document in ids.split(list(documents), dim=1)]
        assert_close(logits, torch.cat(alone, dim=1))

        if not differentiable:
            return
        last = documents[-1]
        next_token_loss(logits[:, -last:], ids[:, -last:]).backward()
        assert (embeds.grad[:, :-last] == 0).all()
        assert (embeds.grad[:, -last:-1].abs().amax(-1) > 0).all()

    # dtypes and outputs

    @torch.no_grad()
    def test_low_precision_stays_low(self, model, token_ids):
        model.bfloat16()
        seen = []
        for layer in model.base_model.layers:
            layer.register_forward_hook(lambda _, __, output: seen.append(output))
        cache = new_cache(model)
        for chunk in token_ids(2, 6).split([4, 1, 1], dim=1):
            assert model(chunk, use_cache=True, **{HOST_CACHE_NAME: cache}).logits.dtype is torch.bfloat16
        tensors = [tensor for output in seen for tensor in (output if isinstance(output, tuple) else (output,))]
        tensors += [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert len(seen) == 3 * num_layers(model)
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        assert model.generate(token_ids(1, 4), max_new_tokens=3, **GREEDY).shape == (1, 7)

    @torch.no_grad()
    def test_low_precision_is_close(self, model, token_ids):
        ids = token_ids(2, 12)
        exact = model(ids).logits
        for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
            logits = copy.deepcopy(model).to(dtype)(ids).logits
            assert (logits - exact).norm() < tolerance * exact.norm()

    @torch.no_grad()
    def test_hidden_states(self, model, token_ids):
        ids, seen = token_ids(2, 7), []
        expected = model(ids).logits
        for layer in model.base_model.layers:
            layer.register_forward_hook(
                lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output)
            )
        outputs = model(ids, output_hidden_states=True)
        assert torch.equal(outputs.logits, expected)
        states = outputs.hidden_states
        assert len(states) == num_layers(model) + 1
        first = self.first_state(model, model.get_input_embeddings()(ids))
        assert {state.shape for state in states[:-1]} == {first.shape}
        assert torch.equal(states[0], first)
        assert all(torch.equal(state, hooked) for state, hooked in zip(states[1:-1], seen, strict=False))
        assert torch.equal(states[-1], model.base_model(ids).last_hidden_state)
        assert_close(model.lm_head(states[-1]), expected)
        assert model(ids).hidden_states is None

    @torch.no_grad()
    def test_attentions(self, model, token_ids):
        model.set_attn_implementation("eager")
        ids = token_ids(2, 7)
        outputs = model(ids, output_attentions=True)
        assert torch.equal(outputs.logits, model(ids).logits)
        assert len(outputs.attentions) == num_layers(model)
        for layer, attention in enumerate(outputs.attentions):
            columns = 7 + self.num_depth_columns(model, layer)
            assert attention.shape == (2, model.config.num_attention_heads, 7, columns)
            assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))
            assert (attention[..., :7].triu(1) == 0).all()

    @torch.no_grad()
    def test_tuple_outputs(self, model, token_ids):
        ids = token_ids(2, 7)
        outputs = model(ids, labels=ids, use_cache=False)
        loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
        assert torch.equal(loss, outputs.loss) and torch.equal(logits, outputs.logits)
        base = model.base_model
        (hidden,) = base(ids, use_cache=False, return_dict=False)
        assert torch.equal(hidden, base(ids).last_hidden_state)

    @torch.no_grad()
    def test_logits_to_keep(self, model, token_ids):
        ids = token_ids(2, 7)
        logits = model(ids).logits
        for kept in (1, 3, torch.tensor([0, 4])):
            part = logits[:, -kept:] if isinstance(kept, int) else logits[:, kept]
            assert_close(model(ids, logits_to_keep=kept).logits, part)

    def test_loss(self, model, token_ids):
        ids = token_ids(2, 7)
        labels = ids.clone()
        labels[0, :3] = -100
        outputs = model(ids, labels=labels)
        each = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        assert_close(outputs.loss, each / 10)
        # over the tokens of an accumulated batch
        assert_close(model(ids, labels=labels, num_items_in_batch=25).loss, each / 25)

    @torch.no_grad()
    def test_embeddings_instead_of_ids(self, model, token_ids):
        ids = token_ids(2, 7)
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        for given in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
            with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
                model(**given)

    # generation

    @pytest.mark.sampled_variants
    def test_generation_feeds_one_token_per_step(self, model, token_ids):
        ids, fed = token_ids(2, 6), []
        expected = greedy_without_cache(model, ids, 8)
        hook = model.register_forward_pre_hook(
            lambda _, __, given: fed.append(
                (given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]).shape[1]
            ),
            with_kwargs=True,
        )
        with hook:
            assert torch.equal(model.generate(ids, max_new_tokens=8, **GREEDY), expected)
            assert fed == [6] + [1] * 7
            fed.clear()
            embeds = model.get_input_embeddings()(ids)
            assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=8, **GREEDY), expected[:, 6:])
            assert fed == [6] + [1] * 7
            fed.clear()
            positions = torch.arange(6).expand(2, -1)
            generated = model.generate(ids, position_ids=positions, max_new_tokens=8, **GREEDY)
            assert torch.equal(generated, expected)
            assert fed == [6] + [1] * 7
            fed.clear()
            assert torch.equal(model.generate(ids, max_new_tokens=3, use_cache=False, **GREEDY), expected[:, :9])
            assert fed == [6, 7, 8]

    @pytest.mark.sampled_variants
    @pytest.mark.parametrize(
        "options",
        [
            {"cache_implementation": "static"},
            {"prefill_chunk_size": 4},
            {"prompt_lookup_num_tokens": 3},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_ways_of_greedy_generation(self, model, token_ids, options):
        # a prompt that repeats itself gives prompt lookup something to find
        ids = token_ids(1, 5).repeat(1, 2)
        generated = model.generate(ids, max_new_tokens=12, **GREEDY, **options)
        assert torch.equal(generated, greedy_without_cache(model, ids, 12))

    @pytest.mark.sampled_variants
    @pytest.mark.parametrize("draft", ["itself", "other weights", "vanilla"])
    def test_assisted_generation(self, model, variant, build, vanilla_twin, token_ids, draft):
        assistants = {
            "itself": lambda: copy.deepcopy(model),
            "other weights": lambda: build(**self.variants[variant], seed=3),
            "vanilla": lambda: vanilla_twin(model),
        }
        assistant = assistants[draft]()
        ids = token_ids(1, 7)
        generated = model.generate(ids, assistant_model=assistant, max_new_tokens=12, **GREEDY)
        assert torch.equal(generated, greedy_without_cache(model, ids, 12))

    @pytest.mark.sampled_variants
    def test_draft_for_a_vanilla_model(self, model, vanilla_twin, token_ids):
        target, ids = vanilla_twin(model), token_ids(1, 7)
        generated = target.generate(ids, assistant_model=model, max_new_tokens=12, **GREEDY)
        assert torch.equal(generated, greedy_without_cache(target, ids, 12))

    @pytest.mark.sampled_variants
    def test_early_exit_generation(self, model, token_ids):
        ids, options = token_ids(1, 7), {"assistant_early_exit": 2, "max_new_tokens": 8}
        cache = DynamicCache(config=Qwen3Config(num_hidden_layers=2))
        cache.update(*torch.ones(2, 1, 1, 3, 4), 0)
        try:
            # what follows a refused draft: the layers after the exit are empty
            cache.crop(-1)
        except TypeError:
            pytest.skip("this transformers has no working early exit for its own models either")
        assert torch.equal(model.generate(ids, **options, **GREEDY), greedy_without_cache(model, ids, 8))

    @pytest.mark.sampled_variants
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_continuous_batching(self, model, variant, token_ids, attention):
        if variant in self.looped_variants:
            pytest.skip("refused for looped models")
        model.set_attn_implementation(attention)
        prompts = [token_ids(1, 7), token_ids(1, 4, seed=2)]
        results = model.generate_batch(
            inputs=[prompt[0].tolist() for prompt in prompts],
            generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32),
            warmup=False,
            progress_bar=False,
        )
        for prompt, result in zip(prompts, results.values(), strict=True):
            expected = greedy_without_cache(model, prompt, 8)
            assert result.generated_tokens == expected[0, prompt.shape[1] :].tolist()

    @pytest.mark.sampled_variants
    def test_continuing_from_a_returned_cache(self, model, token_ids):
        ids = token_ids(1, 6)
        first = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
        cache = first[HOST_CACHE_NAME]
        continued = torch.cat([first.sequences, token_ids(1, 3, seed=7)], dim=1)
        generated = model.generate(continued, max_new_tokens=5, **{HOST_CACHE_NAME: cache}, **GREEDY)
        assert torch.equal(generated, greedy_without_cache(model, continued, 5))

    @pytest.mark.sampled_variants
    def test_beams(self, model, token_ids):
        options = GREEDY | {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        cached, uncached = (model.generate(token_ids(2, 6), use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached.sequences, uncached.sequences)
        assert_close(cached.sequences_scores, uncached.sequences_scores, 1e-4)

    @pytest.mark.sampled_variants
    def test_sampling_several_sequences(self, model, token_ids):
        generated = []
        for use in (True, False):
            torch.manual_seed(0)
            generated.append(
                model.generate(
                    token_ids(2, 6),
                    do_sample=True,
                    num_return_sequences=3,
                    max_new_tokens=6,
                    use_cache=use,
                    eos_token_id=None,
                )
            )
        assert torch.equal(*generated)
        assert len({tuple(row) for row in generated[0].tolist()}) > 2

    # attention implementations

    @ignore_flex_warnings
    @torch.no_grad()
    def test_attention_implementations(self, build, variant, token_ids, attention):
        fields, ids = self.variants[variant], token_ids(2, 12)
        expected = build(**fields, attn_implementation="eager")(ids).logits
        chosen = build(**fields, attn_implementation=attention)
        assert chosen.config._attn_implementation == attention
        assert_close(chosen(ids).logits, expected)
        switched = build(**fields)
        switched.set_attn_implementation(attention)
        assert switched.config._attn_implementation == attention
        assert torch.equal(switched(ids).logits, chosen(ids).logits)

    @torch.no_grad()
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_mask_of_four_dimensions(self, model, variant, token_ids, attention):
        model.set_attn_implementation(attention)
        rows = [token_ids(1, 3), token_ids(1, 5, seed=2)]
        ids, mask = left_padded(rows)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        # padding sees itself; the sliding layers' window is not reached
        seen = torch.ones(5, 5).tril().bool() & (mask[:, None, None, :].bool() | torch.eye(5).bool())
        ready_made = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits = model(ids, attention_mask=ready_made, position_ids=positions).logits
        for b, row in enumerate(rows):
            assert_close(logits[b, -row.shape[1] :], model(row).logits[0])

    @torch.no_grad()
    def test_attention_of_a_server(self, model, variant, token_ids, monkeypatch):
        """How servers run a model: through an attention function of their own, which keeps the keys and values."""
        if variant in self.looped_variants:
            pytest.skip("refused for looped models")
        calls = []

        def attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
            calls.append((module.layer_idx, attention_mask, kwargs["attention_instances"]))
            tokens = query.shape[2]
            seen = torch.ones(tokens, tokens).tril().bool()
            if sliding_window is not None:
                seen &= torch.ones(tokens, tokens).triu(1 - sliding_window).bool()
            output = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
            )
            # no batch, and all heads in one
            return output.transpose(1, 2).flatten(2).flatten(0, 1), None

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "server", attention)
        served = AutoModel.from_config(copy.deepcopy(model.config), attn_implementation="server").eval()
        assert type(served) is type(model.base_model)
        served.load_state_dict(model.base_model.state_dict())
        ids, instances = token_ids(1, 12), {0: object()}
        outputs = served(
            input_ids=ids,
            position_ids=torch.arange(12)[None],
            use_cache=False,
            attention_instances=instances,
            return_dict=False,
        )
        assert [layer for layer, _, _ in calls] == list(range(num_layers(model)))
        assert all(mask is None and given is instances for _, mask, given in calls)
        assert_close(outputs[0], model.base_model(ids).last_hidden_state)

    # no state between calls

    @torch.no_grad()
    def test_calls_do_not_see_each_other(self, model, token_ids):
        other = copy.deepcopy(model)
        first, second = token_ids(2, 9), token_ids(3, 7, seed=2)
        model(first)
        assert torch.equal(model(second).logits, other(second).logits)
        with pytest.raises(ValueError):
            model(first, inputs_embeds=first)
        assert torch.equal(model(second).logits, other(second).logits)

    @torch.no_grad()
    def test_interleaved_batches(self, model, token_ids):
        batches = [token_ids(2, 12), token_ids(2, 12, seed=2)]
        caches = [new_cache(model), new_cache(model)]
        logits = [[], []]
        for start, stop in ((0, 6), (6, 7), (7, 12)):
            for ids, cache, collected in zip(batches, caches, logits, strict=True):
                chunk = ids[:, start:stop]
                collected.append(model(chunk, use_cache=True, **{HOST_CACHE_NAME: cache}).logits)
        for ids, collected in zip(batches, logits, strict=True):
            assert_close(torch.cat(collected, dim=1), model(ids).logits)

    def test_interleaved_training_steps(self, model, token_ids):
        """Two forwards before the first backward."""
        batches = [token_ids(2, 8), token_ids(2, 8, seed=2)]
        parameters = list(model.parameters())
        losses = [model(ids, labels=ids).loss for ids in batches]
        together = [torch.autograd.grad(loss, parameters) for loss in losses]
        for ids, grads in zip(batches, together, strict=True):
            alone = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
            assert all(torch.equal(*pair) for pair in zip(grads, alone, strict=True))

    @pytest.mark.sampled_variants
    def test_threads_share_a_model(self, model, token_ids):
        batches = [token_ids(2, 8 + i, seed=i) for i in range(8)]

        @torch.no_grad()
        def forward(ids):
            return model(ids, output_hidden_states=True)

        expected = [forward(ids) for ids in batches]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                for ours, alone in zip(pool.map(forward, batches), expected, strict=True):
                    assert torch.equal(ours.logits, alone.logits)
                    assert all(
                        torch.equal(*pair) for pair in zip(ours.hidden_states, alone.hidden_states, strict=True)
                    )

    @pytest.mark.sampled_variants
    def test_copies_after_a_forward(self, model, token_ids):
        ids = token_ids(2, 9)
        model(ids, labels=ids).loss.backward()
        logits = model(ids).logits
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(clone(ids).logits, logits)

    @pytest.mark.parametrize("training", [False, True])
    def test_nothing_is_kept_after_a_forward(self, model, token_ids, training):
        ids, alive = token_ids(2, 9), []

        def remember(_, __, output):
            alive.extend(weakref.ref(tensor) for tensor in (output if isinstance(output, tuple) else (output,)))

        for layer in model.base_model.layers:
            layer.register_forward_hook(remember)
        with torch.set_grad_enabled(training):
            outputs = model(ids, labels=ids, use_cache=False)
        if training:
            outputs.loss.backward()
        del outputs
        gc.collect()
        assert alive and all(reference() is None for reference in alive)

    # sequence classification

    @pytest.fixture
    def classifier(self, build, variant):
        return build(model_class=self.sequence_classification_class, **self.variants[variant], num_labels=3)

    @torch.no_grad()
    def test_classification_ignores_padding(self, classifier, token_ids):
        rows = [token_ids(1, 4), token_ids(1, 9, seed=2)]
        alone = torch.cat([classifier(row).logits for row in rows])
        assert alone.shape == (2, 3)
        ids, mask = left_padded(rows)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        assert_close(classifier(ids, attention_mask=mask, position_ids=positions).logits, alone)
        ids[0], mask[0] = ids[0].roll(4), mask[0].roll(4)
        assert_close(classifier(ids, attention_mask=mask).logits, alone)

    def test_classification_loss(self, classifier, token_ids):
        ids, labels = token_ids(4, 6), torch.tensor([0, 2, 1, 2])
        outputs = classifier(ids, labels=labels)
        assert_close(outputs.loss, nn.functional.cross_entropy(outputs.logits, labels))
        outputs.loss.backward()
        for name, parameter in classifier.named_parameters():
            is_idle = self.idle_module is not None and f"{self.idle_module}." in name
            assert parameter.grad.isfinite().all() and (is_idle or parameter.grad.abs().sum() > 0), name

    def test_classification_refuses_depth_weights(self, classifier, token_ids):
        with pytest.raises(ValueError, match="output_depth_weights=True, by argument or in the configuration"):
            classifier(token_ids(1, 5), output_depth_weights=True)

    @torch.no_grad()
    @pytest.mark.parametrize("name", CACHE_NAMES)
    def test_classification_uses_a_cache_of_either_name(self, classifier, token_ids, name):
        ids, cache = token_ids(2, 9), new_cache(classifier)
        classifier(ids[:, :5], use_cache=True, **{name: cache})
        assert lengths(cache) == [5] * num_layers(classifier)
        assert_close(classifier(ids[:, 5:], use_cache=True, **{name: cache}).logits, classifier(ids).logits)
        with pytest.raises(ValueError, match="two names of one argument"):
            classifier(ids, cache=cache, past_key_values=new_cache(classifier))
