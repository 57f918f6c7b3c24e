# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The `depthmix` command."""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from depthmix.auto import AUTO_MAPS
from depthmix.hub import users_references, write_in_place, write_remote_code
from depthmix.version import __version__

from .checkpoint_io import read_json
from .checkpoint_source import expand_path
from .code_check import own_model_type, verify_code
from .converter import DTYPES, TARGETS, convert, inspect_checkpoint, rule_of_targets
from .errors import ConversionError
from .fold_gates import fold_gates
from .plain_text import printable_lines
from .source_configs import read_own


def main(argv: Sequence[str] | None = None) -> None:
    """
    Runs the command; exits with 1 and one message if a checkpoint is refused, with 2 for wrong usage, and with
    128 + n, cleaned up, for a signal n that ends it.
    """
    if (sys.argv[1:] if argv is None else argv)[:1] == ["serve"]:
        _serve(sys.argv[1:] if argv is None else list(argv))
    try:
        # without arguments of a caller this is all that the process does
        with _exit_on_signals(is_process=argv is None):
            arguments = vars(_make_parser().parse_args(argv))
            run = arguments.pop("run")
            print(run(**arguments))
    except (ConversionError, OSError) as error:
        # the message of an error of the system names paths as they are
        sys.exit(printable_lines(f"depthmix: error: {error}"))
    except KeyboardInterrupt:
        print("depthmix: interrupted", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _exit_on_signals(is_process: bool) -> Iterator[None]:
    """
    Signals that would end the process at once unwind it instead, so that nothing half-written is left. A second one
    must not break off the cleaning up, nor the end of the process.
    """

    def leave(number, frame):
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    # python handles signals in the main thread only
    in_main_thread = threading.current_thread() is threading.main_thread()
    names = ("SIGINT", "SIGTERM", "SIGHUP") if in_main_thread else ()
    found = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    # what the caller handles, or ignores as nohup does, stays so
    ends_at_once = (signal.SIG_DFL, signal.default_int_handler)
    taken = {number: handler for number, handler in found.items() if handler in ends_at_once}
    try:
        for number in taken:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in taken.items():
            if not is_process:
                signal.signal(number, handler)
            elif signal.getsignal(number) is leave:
                signal.signal(number, signal.SIG_DFL)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="depthmix", description="Converts checkpoints to models that mix over depth."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "convert",
        # that of all methods' options would take twenty lines before each error
        usage="depthmix convert [options] SOURCE DEST",
        help="convert a checkpoint",
        description="Converts a checkpoint.",
    )
    command.set_defaults(run=convert)
    command.add_argument("source", metavar="SOURCE", help="folder of a safetensors checkpoint, or Hub id")
    command.add_argument("dest", metavar="DEST", help="folder of the result")
    command.add_argument(
        "--to",
        metavar="METHOD",
        type=_method,
        default="depth_attention",
        help=f"{', '.join(TARGETS)}, or a model type of one of these, such as depth_qwen3 (default: %(default)s)",
    )
    command.add_argument(
        "--retrofit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start with the function of a vanilla SOURCE, or as the method was published (default: --retrofit, but "
        "other options are followed)",
    )
    _add_options(command)
    command.add_argument("--dtype", choices=DTYPES, help="dtype of the result (default: that of each tensor)")
    command.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="most bytes per file (default: %(default)s)"
    )
    command.add_argument("--push-to-hub", metavar="REPO", help="upload the result to this Hub repository")
    command.add_argument("--private", action="store_true", help="make that repository a private one")
    command.add_argument(
        "--overwrite", action="store_true", help="replace a model in DEST once the new one is complete"
    )
    command.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    command.add_argument("--revision", metavar="R", help="branch, tag or commit of a SOURCE on the Hub")

    command = commands.add_parser(
        "inspect", help="say what a checkpoint is", description="Says what a checkpoint is and what it would become."
    )
    command.set_defaults(run=inspect_checkpoint)
    command.add_argument("path_or_hub_id", metavar="PATH", help="folder of a safetensors checkpoint, or Hub id")
    command.add_argument("--revision", metavar="R", help="branch, tag or commit of a checkpoint on the Hub")

    command = commands.add_parser(
        "plot",
        help="draw what a model does with its layers",
        description="Draws, of a saved depthmix model on a text, the mean depth weights, how evenly layers use their "
        "sources, how large their outputs are, and the gates. Needs matplotlib, which the extra `plot` installs",
    )
    command.set_defaults(run=_plot)
    command.add_argument("model", metavar="MODEL", help="folder of a saved depthmix model, or Hub id")
    command.add_argument("--text", metavar="FILE", required=True, help="text in UTF-8 that the model reads")
    command.add_argument("-o", "--output", metavar="OUT", required=True, help="the picture: out.png, out.pdf, ...")
    command.add_argument(
        "--tokens", metavar="N", type=int, default=512, help="most tokens of the text (default: %(default)s)"
    )
    command.add_argument(
        "--importance",
        action="store_true",
        help="draw also by how much the loss grows without each source, which takes a forward for each",
    )

    command = commands.add_parser(
        "bundle", help="add the code to a saved model", description="Adds this version's code to a saved model."
    )
    command.set_defaults(run=_bundle)
    command.add_argument("folder", metavar="DIR", help="folder of a saved depthmix model")

    command = commands.add_parser(
        "verify",
        help="say whose code a saved model has",
        description="Says whether the code in a saved model's folder is exactly that of a release of depthmix, and "
        "that nothing in it leads to other code; exits with 1 and a list if not.",
    )
    command.set_defaults(run=verify_code)
    command.add_argument("folder", metavar="DIR", help="folder of a saved depthmix model")

    command = commands.add_parser(
        "fold-gates",
        help="leave gates out that are all one",
        description="Writes a model of which all gates are one without them, as which it computes the same.",
    )
    command.set_defaults(run=_fold_gates)
    command.add_argument("folder", metavar="DIR", help="folder of a saved depthmix model with gates")
    command.add_argument("dest", metavar="OUT", help="folder of the result")
    command.add_argument(
        "--overwrite", action="store_true", help="replace a model in OUT once the new one is complete"
    )

    # only for the list of commands: all its arguments are the host library's
    commands.add_parser("serve", help="`transformers serve` for models of this package", add_help=False)
    return parser


def _method(text: str) -> str:
    if text in TARGETS or text in AUTO_MAPS:
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: {rule_of_targets(text)}")


def _serve(argv: list[str]) -> NoReturn:
    """`transformers serve` with these arguments, in a process in which depthmix has been imported."""
    from transformers.cli.transformers import app

    app(args=argv, prog_name="depthmix")
    sys.exit()


def _add_options(command: argparse.ArgumentParser) -> None:
    """The options of all targets, which are fields of configurations: types and help texts are those of the fields."""
    groups: dict[str, list[str]] = {}
    fields = {}
    for target in TARGETS.values():
        for name, option in target.options.items():
            fields[name] = option
            groups.setdefault(name, []).append(target.name)
    for name, option in fields.items():
        kind = next((each for each in get_args(option.type) if each is not NoneType), option.type)
        given: dict[str, Any] = {"help": f"{option.metadata['help']} ({', '.join(groups[name])})"}
        if get_origin(option.type) is Literal:
            given["choices"] = get_args(option.type)
        elif kind is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": kind, "metavar": "N"}
        command.add_argument(f"--{name.replace('_', '-')}", default=None, **given)


def _fold_gates(folder: str, dest: str, overwrite: bool) -> str:
    gates = fold_gates(folder, dest, overwrite=overwrite)
    return "\n".join([f"Left out, since all their values were one, and written to {dest}:", *gates])


def _plot(model: str, text: str, output: str, tokens: int, importance: bool) -> str:
    # with torch, and the host library's models
    from depthmix.inspection.plot import plot_text

    try:
        return f"Drawn: {plot_text(model, text, output, tokens, importance)}"
    except (ImportError, TypeError, ValueError) as error:
        raise ConversionError(str(error)) from error


def _bundle(folder: str) -> str:
    directory = expand_path(folder, "folder")
    if not directory.is_dir():
        raise ConversionError(f"{directory} is not a folder. Give the folder that holds a saved model.")
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ConversionError(f"{directory} has no config.json.")
    config = read_json(config_path)
    model_type = own_model_type(config, config_path)
    auto_map = config.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise ConversionError(f"{config_path}: auto_map is {auto_map!r}, must map Auto classes to references.")
    read_own(config, config_path)
    files = write_remote_code(directory, AUTO_MAPS[model_type])
    config["auto_map"] = AUTO_MAPS[model_type] | users_references(auto_map, files)
    write_in_place(config_path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return "\n".join(files)


if __name__ == "__main__":
    main()
