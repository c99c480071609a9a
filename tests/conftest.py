"""Shared by all tests: the project's root on the path, and Accelerate kept off XLA."""

import os
import sys
from pathlib import Path

os.environ.setdefault("USE_TORCH_XLA", "0")  # before anything imports Accelerate
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
