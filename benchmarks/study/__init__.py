# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Does mixing over depth help? All ways of it trained side by side; README.md says how and what each run decides."""
