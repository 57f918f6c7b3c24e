# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
What the site has that the folder of documents has not: the files of the repository that documents link to, under
`repository/`, and the API reference, which is made from the docstrings. The documents themselves are written for a
code host, where links lead to files.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "repository"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")

# heading -> the names that stand below it
REFERENCE = {
    "Training": (
        "depthmix.optimizer.optimizer_groups",
        "depthmix.pipeline.pipeline_stages",
        "depthmix.pipeline.next_token_loss",
        "depthmix.pipeline.Plan",
        "depthmix.liger.apply_liger_kernel",
        "depthmix.callbacks.GateWarmup",
        "depthmix.callbacks.MixingLogger",
    ),
    "Saving": ("depthmix.hub.write_remote_code",),
    "Configurations": (
        "depthmix.configuration.configuration_depth_attention.DepthAttentionFields",
        "depthmix.configuration.configuration_attnres.AttnResFields",
        "depthmix.configuration.configuration_value_residual.ValueResidualFields",
        "depthmix.configuration.configuration_denseformer.DenseFormerFields",
        "depthmix.configuration.configuration_mhc.MHCFields",
        "depthmix.configuration.configuration_moda.MoDAFields",
        "depthmix.configuration.configuration_depth_common.DepthMixingFields",
    ),
    "Models": (
        "depthmix.modeling.depth_decoder.DepthDecoderModel.forward",
        "depthmix.modeling.depth_decoder.DepthCausalLM.forward",
        "depthmix.modeling.depth_decoder.DepthModelOutputWithPast",
        "depthmix.modeling.mixing_modules.MixingModule",
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of their folder, and what that links to, and the reference."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(waiting)
    while waiting:
        for target in _targets(waiting.pop()):
            if target in seen or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            if target.is_dir():
                files.append(File.generated(config, _uri(target), content=_listing(target)))
                waiting += [each for each in target.iterdir() if each.suffix == ".md" and each not in seen]
                seen |= set(waiting)
                for each in sorted(target.iterdir()):
                    if each.is_file() and each.name != "README.md" and files.get_file_from_path(_uri(each)) is None:
                        files.append(File.generated(config, _uri(each), abs_src_path=str(each)))
            elif files.get_file_from_path(_uri(target)) is None:
                files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
                if target.suffix == ".md":
                    waiting.append(target)
    files.append(File.generated(config, "reference.md", content="\n".join(_reference())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between files of the repository links between files of the site."""
    source = page.file.abs_src_path
    if source is None:
        return markdown

    def moved(match: re.Match) -> str:
        target = (Path(source).parent / match[1]).resolve()
        return os.path.relpath(_uri(target), os.path.dirname(page.file.src_uri)) + (match[2] or "")

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of the names in brackets that docstrings have, where the reference has them."""
    if page.file.src_uri != "reference.md":
        return html
    anchors = {name.rpartition(".")[2]: name for name in re.findall(r'<h\d id="(depthmix\.[\w.]+)"', html)}

    def link(match: re.Match) -> str:
        name = match[1].rpartition(".")[2]
        code = f"<code>{name}</code>"
        return f'<a href="#{anchors[name]}">{code}</a>' if name in anchors else code

    return re.sub(r"\[<code>~?([\w.]+)</code>\]", link, html)


def _targets(document: Path) -> Iterator[Path]:
    for link in LINK.finditer(document.read_text(encoding="utf-8")):
        yield (document.parent / link[1]).resolve()


def _uri(target: Path) -> str:
    """The name of a file of the repository among the sources of the site. For a folder it is a list of its files."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = f"{OUTSIDE}/{target.relative_to(ROOT).as_posix()}"
    return f"{name}/index.md" if target.is_dir() else name


def _listing(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if each.is_file())
    return "\n".join([f"# {folder.relative_to(ROOT)}\n", *(f"- [{name}]({name})" for name in names)])


def _reference() -> Iterator[str]:
    yield "# API reference\n"
    yield (
        "Made from the docstrings. The classes of a method on a backbone, such as `DepthQwen3ForCausalLM`, are made "
        "when they are asked for. Their fields are those of the method below and of the stock configuration, their "
        "forward is the one below.\n"
    )
    conversion = [f"depthmix.conversion.{name}" for name in _exported(ROOT / "conversion")]
    inspection = [f"depthmix.inspection.{name}" for name in _exported(ROOT / "depthmix" / "inspection")]
    operations = [f"depthmix.kernels.{name}" for name in _exported(ROOT / "kernels" / "depth_ops")]
    for heading, names in {
        "Conversion": conversion,
        **REFERENCE,
        "Looking inside": inspection,
        "Operations": operations,
    }.items():
        yield f"## {heading}\n"
        for name in names:
            yield f"::: {name}\n"


def _exported(package: Path) -> list[str]:
    """What `__all__` of a package lists."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError(f"{package}: it has no __all__")
