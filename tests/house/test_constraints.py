"""Development installs what constraints.txt says, to the version."""

import re
import tomllib

from tests.house.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def test_every_dependency_is_pinned() -> None:
    """Whatever the project or an extra of it asks for has one exact version."""
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    wanted = {
        name_of(requirement)
        for group in (PROJECT["project"]["dependencies"], *extras.values())
        for requirement in group
    } - {"equipoise"}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert wanted - {name_of(pin.replace("==", " ")) for pin in pins} == set()


def test_dev_is_all_extras() -> None:
    """The extra `dev` contains every other one."""
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    others = ",".join(name for name in extras if name != "dev")
    assert extras["dev"][0] == f"equipoise[{others}]"
