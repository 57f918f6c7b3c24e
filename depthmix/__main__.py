# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m depthmix` is the `depthmix` command."""

from depthmix.conversion.cli import main


if __name__ == "__main__":
    main()
