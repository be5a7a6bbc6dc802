"""Run the benchmarks named on the command line, or all of them."""

import importlib
import platform
import sys

import torch

ALL = ("tracking", "compiled", "transforms", "norms", "penalties", "chunks")


def main(names: list[str]) -> None:
    """Print one table a benchmark, under the machine it ran on."""
    cuda = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads{cuda}\n"
    )
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"## {module.__doc__.splitlines()[0]}\n")
        module.main()
        print()


if __name__ == "__main__":
    main(sys.argv[1:] or list(ALL))
