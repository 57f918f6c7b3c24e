# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Conversions that signals meet, and what is there afterwards: `killed_conversions.py SOURCE WORKPLACE COUNT SEED`.

Each trial is a process that converts SOURCE to WORKPLACE/model, with or without an older model there, and with or
without the exchange of folders in one step. At one of its file operations, or at a random time, it gets a signal, or
two. Then an undisturbed run follows. Every combination has its turn; the seed decides on the points. Prints counts and
faults as JSON, and exits with 1 if there are any.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from itertools import product
from pathlib import Path

import depthmix  # noqa: F401 before the processes fork, since importing takes long
from depthmix.conversion import checkpoint_io, convert, output_folder
from depthmix.conversion.cli import main


SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGINT": (signal.SIGINT,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
}
OLDER = ("none", "exchanged", "moved away")
# the last two: before the command has begun
STATUSES = {0, 130, 143, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM}
TIMEOUT = 120
# the operations by which a folder appears and an older one goes; half of the trials meet one of these
LAST_EVENTS = 60


def run(arguments, log, *, events_of=None, numbers=(), at=0, exchange=True, delay=None) -> tuple[int | None, int]:
    """
    Runs the command in a process, which gets signals at the `at`-th operation in `events_of` and at the next, or
    after `delay` seconds. Returns its exit status, None if it hangs, and how many operations there were.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # a background shell hands these down as ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if not exchange:
            output_folder._exchange = lambda first, second: False
        pending, count = list(numbers), 0

        def meet(event, details):
            nonlocal count
            if events_of is None or not event.startswith(("os.", "open", "shutil.", "ctypes.dlsym", "fcntl.")):
                return
            if event == "ctypes.dlsym" or any(str(events_of) in str(detail) for detail in details):
                count += 1
                if pending and count >= at and delay is None:
                    os.kill(os.getpid(), pending.pop(0))

        sys.addaudithook(meet)
        sys.argv = ["depthmix", *map(str, arguments)]
        status = 0
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = 1 if isinstance(end.code, str) else end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, str(count).encode())
        os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + TIMEOUT
    if delay is not None:
        time.sleep(delay)
        for number in numbers:
            os.kill(child, number)
            time.sleep(0.002)
    status = None
    while time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.005)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with open(reader, "rb") as file:
        counted = file.read()
    return status, int(counted or 0)


def read(folder: Path) -> dict[str, bytes] | None:
    if not folder.is_dir():
        return None
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trial(source, folder, expected, events, duration, name, older, draw, number) -> list[str]:
    """What is wrong after one conversion that a signal meets."""
    workplace, log = folder / f"trial{number}", folder / "log"
    workplace.mkdir()
    model = workplace / "model"
    if older != "none":
        shutil.copytree(folder / "older", model)
    at = draw.randint(1, events)
    if draw.random() < 0.5:
        at = max(1, events - draw.randrange(LAST_EVENTS))
    delay = draw.uniform(0, duration) if number % 4 == 3 else None
    arguments = ["convert", source, model, "--depth-stride", "0", "--overwrite"]
    meeting = {"events_of": workplace, "numbers": SIGNALS[name], "at": at, "delay": delay}
    status, _ = run(arguments, log, exchange=older != "moved away", **meeting)
    text = log.read_text(errors="replace")

    faults = []
    if status is None:
        faults.append("hang")
    elif status not in STATUSES:
        faults.append(f"exit status {status}: {text[-2000:]}")
    if "Traceback" in text:
        faults.append(f"traceback: {text[-2000:]}")
    there, left = read(model), sorted(set(os.listdir(workplace)) - {"model"})
    # moving away is two steps, which the next run ends
    may_be_away = older == "moved away" and name == "SIGKILL"
    before = None if older == "none" else expected["older"]
    if there not in (expected["new"], before) and not (may_be_away and there is None):
        faults.append(f"lost or half replaced: {None if there is None else sorted(there)}")
    if left and name != "SIGKILL":
        faults.append(f"left behind: {left}")
    if status == 0 and there != expected["new"]:
        faults.append("success without the new model")
    text = ""
    if there is None and older != "none":
        # a run that may not replace anything: it must bring back what was there
        run(arguments[:-1], log)
        text = log.read_text(errors="replace")
        if read(model) != expected["older"] or "The older model is back there" not in text:
            faults.append("lost")
    status, _ = run(arguments, log)
    text += log.read_text(errors="replace")
    if status != 0 or read(model) != expected["new"]:
        faults.append(f"the next run fails: {text[-2000:]}")
    if os.listdir(workplace) != ["model"]:
        faults.append(f"left behind after the next run: {sorted(os.listdir(workplace))}")
    # the one that is back is called by its own name
    if any(hidden not in text for hidden in left if not (there is None and hidden.endswith(".replaced"))):
        faults.append("what was left is not reported")
    shutil.rmtree(workplace)
    return [f"trial {number}, {name}, older model: {older}, at {delay or at}: {fault}" for fault in faults]


def main_loop(source: Path, folder: Path, count: int, seed: int) -> dict:
    checkpoint_io.CHUNK_BYTES = 4096
    # one in this process: what a conversion imports and caches, all others have from it
    convert(source, folder / "first", to="depth_qwen3", progress=False)
    shutil.rmtree(folder / "first")
    draw, expected = random.Random(seed), {}
    for name, stride in (("older", "3"), ("new", "0")):
        status, _ = run(["convert", source, folder / name, "--depth-stride", stride], folder / "log")
        assert status == 0, (folder / "log").read_text()
        expected[name] = read(folder / name)
    assert expected["older"] != expected["new"]
    shutil.copytree(folder / "older", folder / "counted" / "model")
    begin = time.monotonic()
    arguments = ["convert", source, folder / "counted" / "model", "--depth-stride", "0", "--overwrite"]
    _, events = run(arguments, folder / "log", events_of=folder / "counted")
    duration = time.monotonic() - begin
    assert events > LAST_EVENTS, events

    cases = list(product(SIGNALS, OLDER))
    faults = []
    for number in range(count):
        case = cases[number % len(cases)]
        faults += trial(source, folder, expected, events, duration, *case, draw, number)
    kinds = Counter(fault.split(": ", 2)[2].split(":")[0] for fault in faults)
    return {"trials": count, "operations": events, "faults": faults, "kinds": kinds}


if __name__ == "__main__":
    result = main_loop(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["faults"] else 0)
