"""``python -m equipoise.spec``: the table of claims, each checked again; ``page``: as a page."""

from __future__ import annotations

import sys
from time import perf_counter

from equipoise.spec.claims import Claim, claims
from equipoise.spec.page import page


def main(arguments: list[str]) -> int:
    """Print the table or the page; the number of claims that failed."""
    if arguments == ["page"]:
        print(page(), end="")
        return 0
    if arguments:
        given = " ".join(arguments)
        print(
            f"The argument must be 'page' or nothing, got {given!r}. "
            "Use `python -m equipoise.spec`.",
            file=sys.stderr,
        )
        return 2
    try:
        return _check_all()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2


def _check_all() -> int:
    failed = 0
    for claim in claims():
        faults, how = _checked(claim)
        print(f"{claim.level:<11}{claim.statement}{_in_brackets(claim.scope)}: {how}", flush=True)
        for fault in faults:
            print(f"{'':<11}{fault}")
        failed += bool(faults)
    print("All that was checked here holds." if not failed else f"{failed} claims FAILED.")
    return failed


def _checked(claim: Claim) -> tuple[list[str], str]:
    if claim.check is None:
        return [], claim.by
    start = perf_counter()
    faults = claim.check()
    took = f"{claim.by}, {perf_counter() - start:.2f} s"
    return faults, f"FAILED ({took})" if faults else f"holds ({took})"


def _in_brackets(scope: str) -> str:
    return f" [{scope}]" if scope else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
