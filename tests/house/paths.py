"""Where the house stands: the folders its tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "equipoise"
