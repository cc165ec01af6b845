"""`python -m gvm_stream.metrics > docs/metrics.md`"""

from __future__ import annotations

import sys

from gvm_stream.metrics.docs import page

sys.stdout.write(page())
