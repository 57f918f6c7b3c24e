# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Reading and writing: shards that contradict each other, paths that lead outside, pickles, memory."""

import errno
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from depthmix import DepthQwen3Config
from depthmix.conversion import ConversionError, checkpoint_io, convert, inspect_checkpoint
from depthmix.conversion.checkpoint_io import TensorWrite, open_checkpoint, plan_shards, write_checkpoint


# what the models of the oldest transformers say to converted checkpoints is tested with the converters
pytestmark = pytest.mark.once

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded_source(qwen3_source):
    source = qwen3_source(shard_size="100KB")
    assert len(list(source.glob("model-*.safetensors"))) >= 5
    return source


@pytest.fixture
def refused(tmp_path):
    """`refused(source, message)`: conversion and inspection raise, and nothing is written."""

    def refused(source, message, **kwargs):
        with pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "out" / "converted", progress=False, **kwargs)
        assert not (tmp_path / "out").exists()

    return refused


@pytest.fixture
def opened(monkeypatch):
    """Paths that were opened since, by Python or by safetensors."""
    paths = []
    if not hasattr(sys, "_opened_by_tests"):
        # an audit hook stays for good, so there is one, with a list that is exchanged
        sys._opened_by_tests = paths
        sys.addaudithook(
            lambda event, args: event == "open" and sys._opened_by_tests.append(Path(str(args[0])).resolve())
        )
    sys._opened_by_tests = paths

    def recording_safe_open(path, **kwargs):
        paths.append(Path(path).resolve())
        return safe_open(path, **kwargs)

    monkeypatch.setattr(checkpoint_io, "safe_open", recording_safe_open)
    return paths


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return index["weight_map"]


def assert_same_tensors(source, converted):
    def tensors(folder):
        return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    expected, written = tensors(source), tensors(converted)
    assert expected.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in expected.items())


def write_of(name, tensor):
    code = next(code for code, dtype in checkpoint_io.FLOAT_DTYPES.items() if f"torch.{dtype}" == str(tensor.dtype))
    return TensorWrite.from_function(name, lambda: tensor, code, tuple(tensor.shape))


def assert_same_tensors_in(path, tensors):
    written = load_file(path)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


class TestShards:
    @pytest.mark.parametrize(
        ("shard_size", "files"), [("5GB", 1), ("200KB", 4), (" .2 mb", 4), (100_000, 7), ("100000", 7), ("1KB", 30)]
    )
    def test_resharding(self, shard_size, files, sharded_source, tmp_path):
        convert(sharded_source, tmp_path / "converted", shard_size=shard_size, retrofit=False, progress=False)
        written = sorted(path.name for path in (tmp_path / "converted").glob("*.safetensors"))
        assert_same_tensors(sharded_source, tmp_path / "converted")
        if files == 1:
            assert written == ["model.safetensors"]
            assert not (tmp_path / "converted" / INDEX).exists()
        else:
            assert len(written) >= files
            assert written[0] == f"model-00001-of-{len(written):05d}.safetensors"
            index = json.loads((tmp_path / "converted" / INDEX).read_text())
            assert sorted(set(index["weight_map"].values())) == written
            stored = open_checkpoint(sharded_source)
            assert index["metadata"]["total_size"] == stored.nbytes
            assert index["weight_map"].keys() == stored.tensors.keys()
        if files == 4:
            for path in (tmp_path / "converted").glob("*.safetensors"):
                assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 200_000
        # what safetensors and transformers make of it
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]

    @pytest.mark.parametrize(
        "shard_size", [0, -1, True, 3.5, None, b"5GB", "0GB", "-5GB", "5 parsecs", "", "GB", "nanGB", "0.0001KB"]
    )
    def test_shard_size_is_checked(self, shard_size, qwen3_source, refused):
        rule = "must be a whole number of bytes above 0, or text such as '5GB'"
        refused(qwen3_source(), re.escape(f"shard_size={shard_size!r}: {rule}"), shard_size=shard_size)

    def test_old_shards_do_not_survive_an_overwrite(self, sharded_source, tmp_path):
        dest = shutil.copytree(sharded_source, tmp_path / "converted")
        (dest / "tokenizer.model").write_text("stale")
        report = convert(sharded_source, dest, overwrite=True, progress=False)
        assert [path.name for path in dest.glob("*.safetensors*")] == ["model.safetensors"]
        assert not (dest / "tokenizer.model").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "source"]
        assert sorted(path.name for path in dest.iterdir()) == report.files

    def test_listed_shard_is_missing(self, sharded_source, refused):
        (sharded_source / sorted(sharded_source.glob("model-*"))[2].name).unlink()
        refused(sharded_source, r"files that are not there \(1 found\):\n  - model-00003-of-")

    def test_index_names_the_wrong_shard(self, sharded_source, refused):
        files = sorted(path.name for path in sharded_source.glob("model-*"))
        edit_index(sharded_source, lambda weight_map: weight_map.update({"model.embed_tokens.weight": files[-1]}))
        refused(sharded_source, rf"model\.embed_tokens\.weight is in {files[0]}, but {INDEX} says {files[-1]}")

    def test_index_lists_a_tensor_that_no_shard_has(self, sharded_source, refused):
        edit_index(sharded_source, lambda weight_map: weight_map.update({"model.ghost": min(weight_map.values())}))
        refused(sharded_source, r"model\.ghost is not in model-00001")

    def test_tensor_in_two_listed_shards(self, sharded_source, refused):
        first, second = sorted(sharded_source.glob("model-*"))[:2]
        tensors = load_file(second)
        name, tensor = next(iter(load_file(first).items()))
        save_file(tensors | {name: tensor}, second)
        refused(sharded_source, rf"{name} is in {first.name} and in {second.name}")

    def test_unlisted_shard_is_ignored(self, sharded_source, tmp_path):
        save_file(
            {"model.embed_tokens.weight": torch.zeros(97, 64)}, sharded_source / "model-00099-of-00099.safetensors"
        )
        convert(sharded_source, tmp_path / "converted", retrofit=False, progress=False)
        assert load_file(tmp_path / "converted" / "model.safetensors")["model.embed_tokens.weight"].abs().max() > 0

    def test_single_file_goes_before_an_index(self, sharded_source, tmp_path, qwen3_source):
        other = qwen3_source("other", initializer_range=0.3)
        shutil.copy(other / "model.safetensors", sharded_source)
        report = convert(sharded_source, tmp_path / "converted", retrofit=False, progress=False)
        assert report.warnings == [f"{INDEX} ignored, because model.safetensors is there too."]
        assert_same_tensors(other, tmp_path / "converted")


class TestTensors:
    def change(self, source, edit):
        tensors = load_file(source / "model.safetensors")
        edit(tensors)
        save_file(tensors, source / "model.safetensors")

    def test_missing_extra_and_misshaped_are_all_named(self, qwen3_source, refused):
        source = qwen3_source()

        def edit(tensors):
            del tensors["model.layers.1.mlp.up_proj.weight"]
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(128, 64)
            tensors["model.norm.weight"] = torch.zeros(65)

        self.change(source, edit)
        with pytest.raises(ConversionError) as error:
            convert(source, source.parent / "converted", progress=False)
        text = str(error.value)
        assert "(3 found)" in text
        assert "model.layers.1.mlp.up_proj.weight is missing (looked in model.safetensors)" in text
        assert "model.layers.9.mlp.up_proj.weight in model.safetensors is not part of this model" in text
        assert "model.norm.weight in model.safetensors has shape [65], not [64]" in text

    def test_a_long_list_is_cut(self, qwen3_source, edit_config, refused):
        source = qwen3_source()
        edit_config(source, hidden_size=32)
        refused(source, r"found\):\n(  - .*\n){10}  and \d+ more$")

    def test_two_names_of_one_tensor(self, qwen3_source, refused):
        source = qwen3_source()

        def edit(tensors):
            tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()

        self.change(source, edit)
        refused(source, r"model\.embed_tokens\.weight and embed_tokens\.weight are two names of one tensor")

    def test_quantised_dtype_is_refused(self, qwen3_source, refused):
        source = qwen3_source()
        name = "model.layers.0.mlp.up_proj.weight"
        self.change(source, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
        refused(source, rf"{name} in model\.safetensors is quantised or no weight: its dtype is F8_E4M3")

    def test_mixed_dtypes_are_kept(self, qwen3_source, tmp_path):
        source = qwen3_source()

        def edit(tensors):
            for place, name in enumerate(sorted(tensors)):
                tensors[name] = tensors[name].to(
                    [torch.bfloat16, torch.float32, torch.float16, torch.float64][place % 4]
                )

        self.change(source, edit)
        report = convert(source, tmp_path / "converted", retrofit=False, progress=False)
        expected, written = (
            load_file(source / "model.safetensors"),
            load_file(tmp_path / "converted/model.safetensors"),
        )
        assert {name: tensor.dtype for name, tensor in expected.items()} == {n: t.dtype for n, t in written.items()}
        assert_same_tensors(source, tmp_path / "converted")
        assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
        assert (tmp_path / "converted/model.safetensors").stat().st_size <= 1.01 * report.nbytes

    def test_odd_sizes_are_aligned(self, tmp_path):
        tensors = {
            "a": torch.randn(3).bfloat16(),
            "b": torch.randn(5).double(),
            "c": torch.randn(3),
            "d": torch.ones(1),
        }
        writes = [write_of(name, tensor) for name, tensor in tensors.items()]
        write_checkpoint(tmp_path, plan_shards(writes, "5GB"), progress=False)
        for name, tensor in open_checkpoint(tmp_path).tensors.items():
            assert tensor.offset % tensors[name].itemsize == 0
        assert_same_tensors_in(tmp_path / "model.safetensors", tensors)

    def test_chunks_of_any_length_give_the_same_bytes(self, qwen3_source, tmp_path, monkeypatch):
        source = qwen3_source()
        convert(source, tmp_path / "whole", dtype="bfloat16", progress=False)
        monkeypatch.setattr(checkpoint_io, "CHUNK_BYTES", 40)
        convert(source, tmp_path / "small", dtype="bfloat16", progress=False)
        assert (tmp_path / "whole/model.safetensors").read_bytes() == (
            tmp_path / "small/model.safetensors"
        ).read_bytes()

    def test_start_values_can_be_written(self, tmp_path):
        # start values of parameters that no source has
        tensors = {"a": torch.randn(3, 5).T, "b": torch.tensor(0.5, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
        writes = [write_of(name, tensor) for name, tensor in tensors.items()]
        write_checkpoint(tmp_path, plan_shards(writes, "5GB"), progress=False)
        assert_same_tensors_in(tmp_path / "model.safetensors", tensors)


class TestDamagedFiles:
    def damage_cut_off(self, path):
        path.write_bytes(path.read_bytes()[:-100])

    def damage_cut_off_header(self, path):
        path.write_bytes(path.read_bytes()[:50])

    def damage_lying_length(self, path):
        content = path.read_bytes()
        path.write_bytes(struct.pack("<Q", 2**40) + content[8:])

    def damage_empty(self, path):
        path.write_bytes(b"")

    def damage_overlapping_offsets(self, path):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        begin, end = max(entry["data_offsets"] for entry in header.values() if "data_offsets" in entry)
        assert begin > 0
        for entry in header.values():
            if entry.get("data_offsets") == [begin, end]:
                entry["data_offsets"] = [0, end - begin]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    @pytest.mark.parametrize("damage", ["cut_off", "cut_off_header", "lying_length", "empty", "overlapping_offsets"])
    def test_broken_header(self, damage, sharded_source, refused):
        path = sorted(sharded_source.glob("model-*"))[1]
        getattr(self, f"damage_{damage}")(path)
        refused(sharded_source, rf"{path.name} is not a valid safetensors file")
        with pytest.raises(ConversionError, match="not a valid safetensors file"):
            inspect_checkpoint(sharded_source)

    @pytest.mark.parametrize("content", ["{", "[1, 2]", '{"weight_map": {}}', '{"weight_map": ["model.safetensors"]}'])
    def test_broken_index(self, content, sharded_source, refused):
        (sharded_source / INDEX).write_text(content)
        refused(sharded_source, rf"{INDEX} (is not valid JSON|must hold)")

    def test_key_twice_in_a_header(self, qwen3_source, refused):
        key = "model.norm.weight"
        path = qwen3_source() / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entry = json.loads(content[8 : 8 + length])[key]
        text = f"{{{json.dumps(key)}:{json.dumps(entry)},".encode() + content[9 : 8 + length]
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        assert key in load_file(path), "control: the library accepts it"
        refused(path.parent, rf"{path} is not a valid safetensors file: the key '{key}' occurs twice")

    @pytest.mark.parametrize(
        ("name", "key"),
        [(INDEX, "weight_map"), (INDEX, "model.norm.weight"), ("config.json", "hidden_size"),
         ("config.json", "rope_theta"), ("tokenizer_config.json", "auto_map")],
    )  # fmt: skip
    def test_key_twice_in_a_json_file(self, name, key, sharded_source, refused):
        (sharded_source / "tokenizer_config.json").write_text('{"auto_map": null}')
        path = sharded_source / name
        text = path.read_text()
        assert text.count(f'"{key}":') == 1
        path.write_text(text.replace(f'"{key}":', f'"{key}": null, "{key}":'))
        refused(sharded_source, rf"{name} is not valid JSON: the key '{key}' occurs twice")

    @pytest.mark.parametrize("content", ["", "not json", "[]"])
    def test_broken_config(self, content, qwen3_source, refused):
        source = qwen3_source()
        (source / "config.json").write_text(content)
        refused(source, r"config\.json (is not valid JSON|must hold a JSON object)")

    def test_missing_config(self, qwen3_source, refused):
        source = qwen3_source()
        (source / "config.json").unlink()
        refused(source, r"has no config\.json")

    def test_file_shrinks_while_it_is_read(self, qwen3_source, tmp_path, monkeypatch):
        source = qwen3_source()
        original = checkpoint_io.write_checkpoint

        def shrink_then_write(*args):
            self.damage_cut_off(source / "model.safetensors")
            original(*args)

        monkeypatch.setattr("depthmix.conversion.converter.write_checkpoint", shrink_then_write)
        with pytest.raises(ConversionError, match="became shorter"):
            convert(source, tmp_path / "converted", progress=False)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


class TestPathsLeadingOutside:
    @pytest.fixture
    def outside(self, sharded_source, tmp_path):
        """A valid shard outside the source."""
        (tmp_path / "outside").mkdir()
        return shutil.move(sorted(sharded_source.glob("model-*"))[0], tmp_path / "outside" / "secret.safetensors")

    @pytest.fixture
    def refused_unopened(self, sharded_source, outside, opened, refused):
        def refused_unopened(message):
            opened.clear()
            refused(sharded_source, message)
            assert any(path.is_relative_to(sharded_source) for path in opened), "control: opens are seen"
            assert not any(path.is_relative_to(outside.parent) for path in opened)

        return refused_unopened

    def point_index(self, folder, name):
        def edit(weight_map):
            first = min(weight_map.values())
            weight_map.update({key: name for key, file in weight_map.items() if file == first})

        edit_index(folder, edit)

    @pytest.mark.parametrize("form", ["parent", "absolute", "hidden_parent", "backslash", "unprintable"])
    def test_name_in_the_index(self, form, sharded_source, outside, refused_unopened):
        names = {
            "parent": "../outside/secret.safetensors",
            "absolute": str(outside),
            "hidden_parent": "sub/../../outside/secret.safetensors",
            "backslash": "..\\outside\\secret.safetensors",
            "unprintable": "a\0b.safetensors",
        }
        self.point_index(sharded_source, names[form])
        refused_unopened("not the plain name of a .safetensors file")

    def test_sub_folder(self, sharded_source, outside, refused_unopened):
        (sharded_source / "sub").mkdir()
        shutil.copy(outside, sharded_source / "sub")
        self.point_index(sharded_source, "sub/secret.safetensors")
        refused_unopened("'sub/secret.safetensors' is not the plain name")

    def test_linked_shard(self, sharded_source, outside, refused_unopened):
        (sharded_source / "link.safetensors").symlink_to(outside)
        self.point_index(sharded_source, "link.safetensors")
        refused_unopened(r"link\.safetensors leads out of the checkpoint folder.* Copy the files into the folder")

    @pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "additional_chat_templates/a.jinja"])
    def test_linked_companion(self, name, qwen3_source, tmp_path, opened, refused):
        source = qwen3_source()
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret").write_text("{}")
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(tmp_path / "outside" / "secret")
        opened.clear()
        refused(source, f"{name} leads out of the checkpoint folder")
        assert not any(path.is_relative_to(tmp_path / "outside") for path in opened)

    def test_linked_config(self, qwen3_source, tmp_path, refused):
        source = qwen3_source()
        (tmp_path / "outside").mkdir()
        shutil.move(source / "config.json", tmp_path / "outside")
        (source / "config.json").symlink_to(tmp_path / "outside" / "config.json")
        refused(source, "leads out of the checkpoint folder")

    def test_links_inside_the_folder_and_to_it_are_fine(self, qwen3_source, tmp_path):
        source = qwen3_source()
        (source / "model.safetensors").rename(source / "weights")
        (source / "model.safetensors").symlink_to("weights")
        (tmp_path / "link").symlink_to(source)
        convert(tmp_path / "link", tmp_path / "converted", progress=False)
        assert not (tmp_path / "converted" / "model.safetensors").is_symlink()


class MarkerPayload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


class TestPickledFiles:
    @pytest.fixture
    def payload(self, tmp_path):
        payload = pickle.dumps(MarkerPayload(tmp_path / "marker"))
        pickle.loads(payload)
        assert (tmp_path / "marker").exists(), "control: the payload works"
        (tmp_path / "marker").unlink()
        return payload

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
    def test_only_pickled(self, name, payload, qwen3_source, tmp_path, opened, refused):
        source = qwen3_source()
        (source / "model.safetensors").unlink()
        (source / name).write_bytes(payload)
        opened.clear()
        refused(source, rf"only in pickled files \({name}\)")
        assert source / name not in opened
        assert not (tmp_path / "marker").exists()

    def test_both_formats(self, payload, qwen3_source, tmp_path, opened):
        source = qwen3_source()
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
            (source / name).write_bytes(payload)
        opened.clear()
        report = convert(source, tmp_path / "converted", progress=False)
        assert source / "model.safetensors" in opened
        assert not any(path.suffix in (".bin", ".pt") for path in opened)
        assert not (tmp_path / "marker").exists()
        assert not any(name.endswith((".bin", ".pt")) for name in report.files)

    def test_no_weights_at_all(self, qwen3_source, refused):
        source = qwen3_source()
        (source / "model.safetensors").unlink()
        refused(source, "has neither model.safetensors nor model.safetensors.index.json")
        (source / "adapter_config.json").write_text("{}")
        refused(source, "PEFT adapter")
        (source / "config.json").unlink()
        refused(source, "PEFT adapter")


class TestVerification:
    """What is wrong on the disk is found before the folder gets its name."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda writes: writes[:-1], r"lm_head\.weight was not written"),
            (lambda writes: [*writes, replace(writes[0], name="ghost")], "ghost was not planned"),
            (
                lambda writes: [replace(writes[0], shape=writes[0].shape[::-1]), *writes[1:]],
                r"embed_tokens\.weight was written as .*\(64, 97\)",
            ),
            (
                lambda writes: [replace(writes[0], dtype="F16", shape=(97, 128)), *writes[1:]],
                r"was written as .*'F16'",
            ),
        ],
    )
    def test_weights(self, change, message, qwen3_source, tmp_path, monkeypatch):
        original = checkpoint_io._write_safetensors
        monkeypatch.setattr(
            checkpoint_io, "_write_safetensors", lambda path, writes, bar: original(path, change(writes), bar)
        )
        with pytest.raises(ConversionError, match=message):
            convert(qwen3_source(), tmp_path / "converted", progress=False)
        assert not (tmp_path / "converted").exists()

    def test_config(self, qwen3_source, edit_config, tmp_path, monkeypatch):
        original = DepthQwen3Config.save_pretrained

        def save_pretrained(self, folder, **kwargs):
            original(self, folder, **kwargs)
            edit_config(folder, rms_norm_eps=0.25)

        monkeypatch.setattr(DepthQwen3Config, "save_pretrained", save_pretrained)
        with pytest.raises(ConversionError, match="does not give the same configuration back: rms_norm_eps"):
            convert(qwen3_source(), tmp_path / "converted", progress=False)
        assert not (tmp_path / "converted").exists()


class TestCopies:
    """Bytes that stay as they are, copied by the kernel or without it, between others that are made or rounded."""

    @pytest.fixture
    def write(self, tmp_path):
        """`write()` writes copies of stored tensors among others, and gives what is expected and what is read."""
        torch.manual_seed(0)
        stored = {name: torch.randn(size, 7) for name, size in (("a", 300), ("b", 50), ("c", 1))}
        save_file(stored, tmp_path / "model.safetensors")
        tensors = open_checkpoint(tmp_path).tensors
        made = torch.arange(6.0)
        writes = [
            TensorWrite.from_stored("copied", tensors["a"]),
            TensorWrite.from_function("made", lambda: made, "F32", (6,)),
            TensorWrite.from_stored("rounded", tensors["b"], "BF16"),
            TensorWrite.joined("joined", [tensors["c"], tensors["b"]], "F32", (51, 7)),
            TensorWrite.joined("joined and rounded", [tensors["c"], tensors["b"]], "BF16", (51, 7)),
        ]
        joined = torch.cat([stored["c"], stored["b"]])
        expected = {"copied": stored["a"], "made": made, "rounded": stored["b"].bfloat16(), "joined": joined}
        expected["joined and rounded"] = joined.bfloat16()

        def write():
            (tmp_path / "out").mkdir()
            write_checkpoint(tmp_path / "out", plan_shards(writes, "1GB"), progress=False)
            return expected, load_file(tmp_path / "out" / "model.safetensors")

        return write

    @pytest.mark.parametrize("kernel", ["whole", "in parts", "not there", "between other file systems", "none"])
    def test_are_exact(self, write, kernel, monkeypatch):
        calls = []

        def in_parts(source, target, count, place):
            calls.append(count)
            return own(source, target, min(count, 1000), place)

        def refuse(*arguments):
            calls.append(arguments)
            raise OSError({"not there": errno.ENOSYS, "between other file systems": errno.EXDEV}[kernel], "refused")

        own = getattr(os, "copy_file_range", None)
        if kernel == "none":
            monkeypatch.delattr(os, "copy_file_range", raising=False)
        elif kernel == "in parts":
            monkeypatch.setattr(os, "copy_file_range", in_parts)
        elif kernel != "whole":
            monkeypatch.setattr(os, "copy_file_range", refuse)
        expected, found = write()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        # without the kernel it is asked once for each tensor
        assert len(calls) == {"in parts": 9 + 1 + 2, "whole": 0, "none": 0}.get(kernel, 3)

    def test_that_fail(self, write, monkeypatch):
        def fail(*arguments):
            raise OSError(errno.EIO, "broken disk")

        monkeypatch.setattr(os, "copy_file_range", fail)
        with pytest.raises(OSError, match="broken disk"):
            write()


MEASURE_MEMORY = """
import sys
# what would be imported later, and is no part of what a model takes
from depthmix import DepthQwen3ForCausalLM
from depthmix.conversion import convert

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

before = kilobytes("VmRSS:")
# the highest mark so far is that of the imports
open("/proc/self/clear_refs", "w").write("5")
convert(sys.argv[1], sys.argv[2], retrofit=False, progress=False)
print((kilobytes("VmHWM:") - before) // 1000)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the memory use from /proc")
def test_memory_does_not_depend_on_the_model(tmp_path, tiny, layer_shapes):
    """3 shards of 200 MB."""
    layers, hidden, inner = 3, 512, 65_000
    width, heads, kv_heads = tiny["head_dim"], tiny["num_attention_heads"], tiny["num_key_value_heads"]
    layer = layer_shapes(hidden, inner, heads, kv_heads, width)
    source = tmp_path / "source"
    source.mkdir()
    weight_map, total = {}, 0
    for number in range(layers):
        shapes = {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        if number == 0:
            shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (tiny["vocab_size"], hidden))
            shapes["model.norm.weight"] = (hidden,)
        total += write_zeros(source / f"model-{number}.safetensors", shapes)
        weight_map |= dict.fromkeys(shapes, f"model-{number}.safetensors")
    (source / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    fields = tiny | {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    (source / "config.json").write_text(json.dumps(fields | {"model_type": "qwen3", "dtype": "bfloat16"}))

    command = [sys.executable, "-c", MEASURE_MEMORY, source, tmp_path / "converted"]
    megabytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert total > 3 * 195e6
    assert megabytes < 100, "half a shard"
    written = tmp_path / "converted" / "model.safetensors"
    assert total <= written.stat().st_size <= 1.01 * total
    assert {tensor.dtype for tensor in open_checkpoint(tmp_path / "converted").tensors.values()} == {"BF16"}
    written.unlink()


def write_zeros(path, shapes):
    """A sparse bf16 file: takes no time and no space. Returns the bytes of its tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset
