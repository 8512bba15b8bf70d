"""The package is in few layers, with few entries at the top, short files, and little written twice."""

import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "constmem"
MODULES = sorted(PACKAGE.rglob("*.py"))
RUN = 6  # lines that two places share


def names_at_the_top() -> set[str]:
    return {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def repeated(texts: dict[str, str]) -> list[tuple[str, int, str, int]]:
    """Pairs of places that share `RUN` lines or more, but for blank ones: file and line of both."""
    lines = {
        name: [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        for name, text in texts.items()
    }
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, own in lines.items():
        for k in range(len(own) - RUN + 1):
            places[tuple(line for _, line in own[k : k + RUN])].append((name, k))
    shared = {
        (first, second)
        for found in places.values()
        for i, first in enumerate(found)
        for second in found[i + 1 :]
        if first[0] != second[0] or second[1] - first[1] >= RUN
    }
    begin = [
        (a, k, b, m) for (a, k), (b, m) in shared if ((a, k - 1), (b, m - 1)) not in shared
    ]  # not the middle of a longer run
    return sorted((a, lines[a][k][0], b, lines[b][m][0]) for a, k, b, m in begin)


def test_there_are_seven_layers_and_every_package_is_in_one() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert len(layers) == 7
    packages = {name.strip().removeprefix("constmem.") for layer in layers for name in layer.split("|")}
    assert packages == names_at_the_top() - {"__init__"}


def test_the_package_has_fourteen_modules_and_packages_at_the_top() -> None:
    assert len(names_at_the_top()) <= 14


def test_no_file_has_more_than_300_lines() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_the_number_of_modules_does_not_grow_unnoticed() -> None:
    assert len(MODULES) <= 122


def test_places_that_repeat_each_other_are_found() -> None:
    run = "\n\n".join(f"line {i}" for i in range(7))
    assert repeated({"a": f"x\n{run}\ny", "b": f"z\n{run}"}) == [("a", 2, "b", 2)]
    assert repeated({"a": f"{run}\nother\n{run}"}) == [("a", 1, "a", 15)]
    assert repeated({"a": "\n".join(["pass"] * RUN), "b": "pass"}) == []


def test_at_most_25_pairs_of_places_share_six_lines() -> None:
    found = repeated({str(path.relative_to(PACKAGE)): path.read_text() for path in MODULES})
    assert len(found) <= 25, found
