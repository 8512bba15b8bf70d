"""What the documentation says is run: doctests, and every Python block of README and docs."""

import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import constmem
from constmem.data.catalogue import EVENTS
from constmem.training.loop import Run, build
from constmem.training.recipes import changed, complete, recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ABSENT = [] if importlib.util.find_spec("triton") else ["constmem.kernels.triton_observe"]
FOUND = (module.name for module in pkgutil.walk_packages(constmem.__path__, "constmem."))
MODULES = sorted(["constmem", *(name for name in FOUND if name not in ABSENT)])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is for"
    outcome = doctest.testmod(module)
    assert outcome.failed == 0


def test_there_are_examples() -> None:
    found = sum(
        len(test.examples)
        for name in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert found > 20


def blocks_run(page: Path) -> Iterator[re.Match[str]]:
    """The blocks of a page, each just run after those before it, as a reader would type them."""
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], page.name, "exec")  # errors name the line of the page
        exec(code, namespace)
        yield block


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = sum(1 for _ in blocks_run(page))
    assert found == page.read_text().count("```python\n")


def test_the_readme_names_the_two_commands_and_is_read_in_one_sitting() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    assert len(text.split()) <= 1200


def test_code_of_the_readme_runs_and_its_first_prints_what_stands_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_run(PAGES[0])
    first, out = next(blocks), capsys.readouterr().out
    found = re.match(r"\s*^```\n(.*?)^```", first.string[first.end() :], re.MULTILINE | re.DOTALL)
    assert found is not None
    assert len(list(blocks)) >= 4
    printed, shown = ([re.findall(r"[\d.,]+\d|\d", line) for line in part.splitlines()]
                      for part in (out, found[1]))  # fmt: skip
    assert len(printed) == len(shown) > 3
    for now, then in zip(printed, shown, strict=True):
        assert (now[0], now[3]) == (then[0], then[3])  # rows and bytes
        assert float(now[1]) == pytest.approx(float(then[1]), abs=0.0101)  # the last digit shown
        assert float(now[2]) == pytest.approx(float(then[2]), abs=1.01)
    errors = [float(line[1]) for line in printed]
    assert errors == sorted(errors, reverse=True)


def headings(page: Path) -> set[str]:
    """Where links into a page may point to: its headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_and_headings_the_pages_point_to_exist() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} points to {target}"
            if heading:
                assert heading in headings(there), f"{page.name} points to #{heading} of {there.name}"


@pytest.mark.slow
def test_the_site_is_built_without_warnings_starts_with_the_readme_and_shows_formulas(tmp_path: Path) -> None:
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name)
    built = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    idea = (tmp_path / "idea.html").read_text()
    assert idea.count("<math") > 20
    assert not re.search(r"\$|\\(mathrm|sum|log)", idea)
    assert "https://cdn" not in idea  # nothing is fetched from elsewhere
    assert "StreamingRegressor(warmup=1000)" in re.sub("<[^>]+>", "", (tmp_path / "index.html").read_text())


OUTSIDE = {"https://docs.ray.io"}  # pages of others; `sphinx-build -b linkcheck` asks for them


def test_pages_of_others_are_few_and_known() -> None:
    found = {link for page in PAGES for link in re.findall(r"\]\((https?:[^)]+)\)", page.read_text())}
    assert found == OUTSIDE


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="this is no git checkout: what is tracked is unknown"
)
def test_the_root_of_the_repository_has_at_most_fourteen_entries() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {line.partition("/")[0] for line in listed.splitlines()}
    assert "pyproject.toml" in entries
    assert len(entries) <= 14, sorted(entries)


def test_public_names_are_sorted_and_documented() -> None:
    names = constmem.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
    assert all(getattr(constmem, name).__doc__ for name in names)


OTHERWISE = {  # as their notes say
    ("taxi", "trivial"),
    *((name, "cmhp-faithful") for name in ("taxi", "mooc", "reddit")),
}
RENAMED = {"cmhp-faithful": "model"}  # settings that had other names when its rows were made
TRAINED = [
    "emnist",
    "celeba32",
    "celeba32-longer",
    "celeba64",
    "celeba128",
    "gp",
    "gp-moments",
    "tables",
    *(name for name in EVENTS if (RESULTS / f"{name}.json").exists()),
]


@pytest.mark.parametrize("table", TRAINED)
def test_the_recipes_of_today_are_those_that_made_the_committed_rows(table: str) -> None:
    content = json.loads((RESULTS / f"{table}.json").read_text())
    for row in content["rows"]:
        dataset, name, settings = row["dataset"], row["model"], row["settings"]
        command = content["command"].replace("--steps ", "--set steps=").replace("MODEL", name)
        sets = re.findall(r"--set (\S+)", command)
        now = changed(recipe(dataset, name, row["recipe"]), sets)
        if (dataset, name) in OTHERWISE:
            (told,) = re.findall(rf"\b{name}('s| with) (.*?)[;.](?: |$)", content["note"], re.IGNORECASE)
            now = changed(now, re.findall(r"--set (\S+=\d+)", told[1]))
            settings = {key: value for key, value in settings.items() if key != RENAMED.get(name)}
        made = {key: value for key, value in asdict(now).items() if key in settings}
        kept = {key: value for key, value in complete(settings).items() if key in settings}
        assert kept == made, f"{name} was trained by another recipe"
        parameters = build(Run(dataset, name, row["recipe"], now)).parameters()
        assert row["parameters"] == sum(p.numel() for p in parameters), f"{name} was of another size"
