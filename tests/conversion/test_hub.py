# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Sources in the Hub's cache, and pushing."""

import json
import logging
import shutil
import traceback
from functools import partial

import pytest
from huggingface_hub import HfApi, ModelCard, ModelInfo, snapshot_download
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM

from depthmix.conversion import ConversionError, checkpoint_source, convert, inspect_checkpoint
from depthmix.conversion.cli import main


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(qwen3_source, tmp_path):
    """A checkpoint as the Hub's cache holds it: `cached(repository)` gives the folder of the snapshot."""

    def cached(repository="models--acme--qwen-tiny", *, shared=False):
        source = qwen3_source(f"plain-{repository}", shard_size="300KB")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
        (source / "README.md").write_text("---\nlicense: mit\n---\n")
        cache = tmp_path / "cache"
        snapshot = cache / repository / "snapshots" / COMMIT
        (cache / repository / "blobs").mkdir(parents=True)
        for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
            blob = cache / repository / "blobs" / f"blob{number}"
            shutil.copy(path, blob)
            if shared:
                store = cache / "blobs" / "ab" / f"ab{number}"
                store.parent.mkdir(parents=True, exist_ok=True)
                blob.rename(store)
                blob.symlink_to(store)
                (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        return snapshot

    return cached


@pytest.mark.parametrize("shared", [False, True])
def test_links_into_the_blobs_are_followed(shared, cached, tmp_path, token_ids):
    snapshot = cached(shared=shared)
    report = convert(snapshot, tmp_path / "converted", depth_stride=0, progress=False)
    assert not any(path.is_symlink() for path in (tmp_path / "converted").rglob("*"))
    assert "additional_chat_templates/tool.jinja" in report.files
    card = ModelCard.load(tmp_path / "converted" / "README.md")
    assert (card.data.base_model, card.data.license) == ("acme/qwen-tiny", "mit")
    ids = token_ids(1, 9)
    vanilla, converted = (AutoModelForCausalLM.from_pretrained(path) for path in (snapshot, tmp_path / "converted"))
    assert vanilla(ids).logits.equal(converted(ids).logits)


def test_links_into_the_blobs_of_another_repository_are_not(cached, tmp_path):
    snapshot, other = cached(), cached("models--acme--private")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to((other / "config.json").resolve())
    with pytest.raises(ConversionError, match="leads out of the checkpoint folder"):
        convert(snapshot, tmp_path / "converted", progress=False)


def test_a_hub_id_is_downloaded_without_code_and_pickles(cached, tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **kwargs):
        calls.append((repo_id, kwargs))
        return str(cached())

    monkeypatch.setattr(checkpoint_source, "snapshot_download", snapshot_download)
    report = convert("acme/qwen-tiny", tmp_path / "converted", revision="v2", token="secret", progress=False)
    ((repo_id, kwargs),) = calls
    assert (repo_id, kwargs["revision"], kwargs["token"]) == ("acme/qwen-tiny", "v2", "secret")
    assert {"config.json", "model*.safetensors", "tokenizer.json"} < set(kwargs["allow_patterns"])
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in kwargs["allow_patterns"])
    assert report.source == "acme/qwen-tiny"
    text = (tmp_path / "converted" / "README.md").read_text()
    assert "base_model: acme/qwen-tiny" in text and "secret" not in text


class TestRepositoriesWithoutSafetensors:
    @pytest.fixture
    def refused(self, tmp_path, monkeypatch):
        """`refused(names, cached, message)`: a repository, with a part of its files in the cache, is refused."""

        def refused(names, cached, message):
            def model_info(repo_id, *, revision, token):
                assert (repo_id, revision, token) == ("acme/qwen-tiny", "v2", "secret")
                if names is None:
                    raise RuntimeError("no network")
                return ModelInfo(id=repo_id, siblings=[{"rfilename": name} for name in names])

            snapshot = tmp_path / "snapshot"
            for name in cached:
                snapshot.mkdir(exist_ok=True)
                (snapshot / name).write_text("{}")
            monkeypatch.setattr(checkpoint_source, "snapshot_download", lambda repo_id, **kwargs: str(snapshot))
            monkeypatch.setattr(checkpoint_source, "model_info", model_info)
            with pytest.raises(ConversionError, match=message):
                inspect_checkpoint("acme/qwen-tiny", revision="v2", token="secret")

        return refused

    def test_pickles(self, refused):
        names = ["README.md", "config.json", "pytorch_model.bin"]
        refused(names, ["config.json"], r"^acme/qwen-tiny has its weights only in pickled files \(pytorch_model.bin\)")

    def test_adapter(self, refused):
        # the download fits none of these files, and then there is no folder
        names = ["adapter_config.json", "adapter_model.safetensors"]
        refused(names, [], "^acme/qwen-tiny holds a PEFT adapter. Merge it")

    def test_neither(self, refused):
        refused(["config.json"], ["config.json"], "^acme/qwen-tiny has neither model.safetensors nor")

    def test_offline(self, refused):
        refused(None, [], "^acme/qwen-tiny has neither model.safetensors nor")
        refused(None, ["config.json", "pytorch_model.bin"], "only in pickled files")


def test_a_cached_hub_id_needs_no_network(cached, tmp_path, monkeypatch):
    snapshot = cached()
    repository = snapshot.parent.parent
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(checkpoint_source, "model_info", lambda *args, **kwargs: pytest.fail("asks the Hub"))
    monkeypatch.setattr(
        checkpoint_source, "snapshot_download", partial(snapshot_download, cache_dir=repository.parent)
    )
    description = inspect_checkpoint("acme/qwen-tiny")
    assert (description.source, description.layout) == ("acme/qwen-tiny", "qwen3")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("acme/qwen-tiny", "There is no local folder acme/qwen-tiny, and the Hub did not deliver"),
        ("./acme/qwen-tiny", "There is no folder acme/qwen-tiny"),
        ("/acme/qwen-tiny", "There is no folder /acme/qwen-tiny"),
        ("../qwen-tiny", "There is no folder ../qwen-tiny"),
        ("a/b/c", "There is no folder a/b/c"),
        ("~/qwen-tiny-nowhere", "There is no folder .*/qwen-tiny-nowhere"),
    ],
)
def test_sources_that_do_not_exist(source, message, tmp_path):
    for call in (lambda: inspect_checkpoint(source), lambda: convert(source, tmp_path / "converted", progress=False)):
        with pytest.raises(ConversionError, match=message):
            call()


class TestPush:
    @pytest.fixture
    def hub(self, monkeypatch, tmp_path):
        """Stands in for the Hub; `hub["error"]` makes uploads fail."""
        hub = {"calls": [], "error": None, "is_private": True}

        def create_repo(self, repo_id, private, exist_ok):
            hub["calls"].append(("create", repo_id, private, exist_ok, self.token))
            return f"https://hub/{repo_id}"

        def model_info(self, repo_id):
            return ModelInfo(id=repo_id, private=hub["is_private"])

        def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
            if hub["error"]:
                raise hub["error"]
            hub["calls"].append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))
            hub["delete_patterns"] = delete_patterns

        monkeypatch.setattr(HfApi, "create_repo", create_repo)
        monkeypatch.setattr(HfApi, "model_info", model_info)
        monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
        return hub

    def test_uploads_the_finished_folder(self, hub, qwen3_source, tmp_path):
        report = convert(
            qwen3_source(), tmp_path / "converted", push_to_hub="acme/depth", token="secret", progress=False
        )
        create, (_, repo_id, files) = hub["calls"]
        assert create == ("create", "acme/depth", None, True, "secret")
        assert (repo_id, files) == ("acme/depth", report.files)
        assert {"README.md", "config.json", "model.safetensors", "modeling_depth_attention.py"} <= set(files)
        # what an earlier upload with other shards left there
        earlier = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
        # and a model of another method, with another tokenizer
        earlier += ["modeling_mhc.py", "depthmix_code.json", "tokenizer.model", "chat_template.jinja"]
        earlier += ["generation_config.json", "additional_chat_templates/tools.jinja"]
        others = [
            "adapters/adapter_model.safetensors",
            "adapter_model.safetensors",
            "sub/model.safetensors",
            "model-00001-of-00002/x.safetensors",
            "model-old/model-00001-of-00002.safetensors",
            *("README.md", "LICENSE", ".gitattributes", "my_code.py", "sub/modeling_mhc.py", "old/tokenizer.json"),
        ]
        assert list(filter_repo_objects(earlier + others, allow_patterns=hub["delete_patterns"])) == earlier
        assert report.pushed_to == "https://hub/acme/depth" and "https://hub/acme/depth" in str(report)

    def test_not_in_a_dry_run(self, hub, qwen3_source, tmp_path):
        report = convert(qwen3_source(), tmp_path / "converted", push_to_hub="acme/depth", dry_run=True)
        assert hub["calls"] == []
        assert "would go to acme/depth on the Hub" in str(report) and report.pushed_to is None

    def test_private(self, hub, qwen3_source, tmp_path):
        main(["convert", str(qwen3_source()), str(tmp_path / "new"), "--push-to-hub", "acme/depth", "--private"])
        assert [call[:3] for call in hub["calls"]] == [
            ("create", "acme/depth", True),
            ("upload", *hub["calls"][1][1:]),
        ]

    def test_a_public_repository_is_not_taken_for_a_private_one(self, hub, qwen3_source, tmp_path):
        hub["is_private"] = False
        options = {"push_to_hub": "acme/depth", "private": True, "progress": False}
        with pytest.raises(ConversionError, match="there already and is public"):
            convert(qwen3_source(), tmp_path / "converted", **options)
        assert [call[0] for call in hub["calls"]] == ["create"]

    def test_private_without_a_repository(self, qwen3_source, tmp_path):
        with pytest.raises(ConversionError, match="^private: is for the repository of push_to_hub"):
            convert(qwen3_source(), tmp_path / "converted", private=True, progress=False)

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize("repo_id", ["", "a/b/c", "acme/de pth"])
    def test_the_name_is_checked_first(self, repo_id, dry_run, hub, qwen3_source, tmp_path):
        with pytest.raises(ConversionError, match=f"push_to_hub='{repo_id}': not the name of a Hub repository"):
            convert(qwen3_source(), tmp_path / "converted", push_to_hub=repo_id, dry_run=dry_run, progress=False)
        assert not (tmp_path / "converted").exists() and hub["calls"] == []

    # the client's HTTP library has its own base class
    @pytest.mark.parametrize("error_class", [ConnectionError, type("ConnectError", (Exception,), {})])
    def test_a_failure_says_that_the_conversion_is_there(self, error_class, hub, qwen3_source, tmp_path):
        hub["error"] = error_class("no network")
        with pytest.raises(
            ConversionError,
            match=r"complete in .*converted, but pushing to acme/depth failed: no network\n"
            r".* hf upload acme/depth /.*/converted$",
        ):
            convert(qwen3_source(), tmp_path / "converted", push_to_hub="acme/depth", progress=False)
        assert json.loads((tmp_path / "converted" / "config.json").read_text())["model_type"] == "depth_qwen3"


class TestToken:
    TOKEN = "a-token-of-a-server-of-its-own"

    @pytest.fixture
    def echoing(self, monkeypatch):
        """A Hub whose errors and log show the token that they were given."""
        seen = []

        def snapshot_download(repo_id, *, token, **kwargs):
            seen.append(token)
            logging.getLogger("huggingface_hub.utils").warning("sent %s", token)
            raise RuntimeError(f"401: `Authorization: Bearer {token}` is not valid")

        monkeypatch.setattr(checkpoint_source, "snapshot_download", snapshot_download)
        monkeypatch.setattr(checkpoint_source, "model_info", snapshot_download)
        return seen

    @pytest.mark.parametrize("token", [TOKEN, f"{TOKEN}\n", f" {TOKEN}\t", "hf_abcdefghijklmnop"])
    def test_no_message_and_no_log_shows_it(self, token, echoing, tmp_path, caplog):
        for call in (
            lambda: inspect_checkpoint("acme/x", token=token),
            lambda: convert("acme/x", tmp_path / "x", token=token),
        ):
            with pytest.raises(ConversionError) as error:
                call()
            shown = "".join(traceback.format_exception(error.value)) + caplog.text
            assert "401" in shown and "sent hf_***" in shown
            assert token.strip() not in shown
        assert set(echoing) == {token.strip()}

    def test_nor_the_one_that_is_logged_in(self, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", self.TOKEN)
        monkeypatch.setattr(checkpoint_source, "snapshot_download", self.fail)
        with pytest.raises(ConversionError) as error:
            inspect_checkpoint("acme/x")
        assert "401" in str(error.value) and self.TOKEN not in str(error.value)

    def fail(self, *args, **kwargs):
        raise OSError(f"401 for {self.TOKEN}")

    @pytest.mark.parametrize("token", ["", " ", "\n"])
    def test_an_empty_one_is_none(self, token, echoing):
        with pytest.raises(ConversionError):
            inspect_checkpoint("acme/x", token=token)
        assert echoing == [None]

    @pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel"])
    def test_what_no_header_can_hold_is_refused_unseen(self, token, echoing):
        with pytest.raises(ConversionError, match="^token: must be one word") as error:
            inspect_checkpoint("acme/x", token=token)
        assert echoing == [] and token not in str(error.value)

    def test_one_in_the_wrong_place(self, tmp_path):
        token = "hf_abcdefghijklmnop"
        for call in (
            lambda: inspect_checkpoint(f"https://user:{token}@hub/acme/x"),
            lambda: convert(tmp_path, tmp_path / "x", push_to_hub=f"a/b/{token}"),
        ):
            with pytest.raises(ConversionError) as error:
                call()
            assert token not in "".join(traceback.format_exception(error.value))

    def test_a_failed_push(self, qwen3_source, tmp_path, monkeypatch):
        def create_repo(self, *args, **kwargs):
            raise RuntimeError(f"no right to write for {self.token}")

        monkeypatch.setattr(HfApi, "create_repo", create_repo)
        options = {"push_to_hub": "acme/depth", "token": self.TOKEN, "progress": False}
        with pytest.raises(ConversionError, match="no right to write") as error:
            convert(qwen3_source(), tmp_path / "converted", **options)
        assert self.TOKEN not in "".join(traceback.format_exception(error.value))
