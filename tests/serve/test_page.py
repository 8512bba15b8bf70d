"""The page in a real browser: the library's numbers, controls by mouse and keys, clear words on errors."""

import gzip
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from page_kernels import build
from safetensors.torch import load
from torch import Tensor

from constmem import CMANP
from constmem.core.files import advice_on
from constmem.neural_processes.points import Scales
from constmem.serve.page import WEB, hosted, write_model, write_page

pytestmark = pytest.mark.browser
api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Shown = Callable[..., Any]
WEIGHTS = "model.safetensors.gz"
READY = '#panel-{}[data-ready="true"]'
PREDICTED = """async ([folder, points, targets, removed]) => {
    const [{ Kernels }, { fetchWeights }, { CMANP }] =
        await Promise.all(["kernels", "weights", "model"].map((name) => import(`./${name}.js`)));
    const kernels = await Kernels.load("kernels.wasm");
    const model = new CMANP(await fetchWeights(folder, kernels));
    const answer = (state) => {
        const { mean, std } = model.predict(state, targets);
        return [[...mean], [...std]];
    };
    const whole = model.observe(points), stream = model.empty();
    for (const point of points) model.update(stream, point);
    const merged = model.observe(points.slice(0, 3));
    model.merge(merged, model.observe(points.slice(3)));
    const less = model.copy(whole), done = model.remove(less, model.observe(removed));
    const faded = model.observe(points.slice(0, 3));
    model.decay(faded, -0.7);
    model.merge(faded, model.observe(points.slice(3)));
    return { answers: [whole, stream, merged, less, faded].map(answer), done, bytes: model.bytes };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = write_page(tmp_path_factory.mktemp("page"))
    with hosted(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with closing(started):
            yield started


@pytest.fixture
def shown(site: tuple[Path, str], browser: Any) -> Iterator[Shown]:
    """Open the page; at the end nothing may stand on the console."""
    opened, said = [], []

    def show(*, tab: str | None = "digit", script: str | None = None, width: int = 1100) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 850}, has_touch=width < 500)
        opened.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        if script is not None:
            page.add_init_script(script)
        page.goto(site[1])
        if tab is not None:
            page.wait_for_selector(READY.format("digit"))
            page.click(f"#tab-{tab}")
            page.wait_for_selector(READY.format(tab))
        return page

    yield show
    for page in opened:
        page.close()
    assert [text for text in said if "Failed to load resource" not in text] == []


def odd() -> CMANP:
    """A model whose sizes fit no vector, with moments, in units of its own."""
    torch.manual_seed(0)
    sizes = {"dim": 42, "num_heads": 6, "depth": 2, "num_slots": 13, "num_latents": 11, "hidden": 27}
    model = CMANP(dim_x=2, dim_y=3, residual="raw", embed_depth=2, moments=6, experts=3, **sizes)  # type: ignore[arg-type]
    for part in (model.weigh, model.head.predictor.layers[-1]):  # type: ignore[union-attr,index]
        torch.nn.init.normal_(part.weight, std=0.3)  # type: ignore[union-attr,arg-type]
    model.set_scales(
        Scales(x_mean=[1.0, 2.0], x_std=[2.0, 3.0], y_mean=[0.5, 1.0, 1.5], y_std=[1.0, 2.0, 0.5])
    )
    return model.eval()


def saved(folder: Path) -> CMANP:
    """The weights as they are in the file, some of float16 and some of float32, in a model of float32."""
    content = gzip.decompress((folder / "model.safetensors.gz").read_bytes())
    with TemporaryDirectory() as plain:
        (Path(plain) / "config.json").write_bytes((folder / "config.json").read_bytes())
        (Path(plain) / "model.safetensors").write_bytes(content)
        model = CMANP.from_pretrained(plain).float()
    tensors = load(content)
    model.load_state_dict({name: t if t.dtype == torch.float64 else t.float() for name, t in tensors.items()})
    return model.eval()


def answer(model: CMANP, state: Any, xt: Tensor) -> list[Tensor]:
    found = model.query(state, xt)
    return [found.mean.flatten().double(), found.variance.sqrt().flatten().double()]


def same(numbers: list[float], reference: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(numbers).double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["emnist", "gp", "odd"])
def test_the_page_computes_what_the_library_does(name: str, site: tuple[Path, str], shown: Shown) -> None:
    folder = site[0] / "models" / name
    if name == "odd":
        write_model(odd(), folder)
    model = saved(folder)
    generator = torch.Generator().manual_seed(1)
    x, xt = (2 * torch.rand(1, n, model.dim_x, generator=generator) - 1 for n in (150, 40))
    y = torch.rand(1, 150, model.dim_y, generator=generator) - 0.5
    points = torch.cat([x, y], -1)[0].tolist()
    given = [f"models/{name}", points, xt[0].tolist(), points[:1]]
    got = shown(tab=None).evaluate(PREDICTED, given)
    with torch.no_grad():
        whole, first, rest = (model.condition(x[:, i:j], y[:, i:j]) for i, j in ((0, 150), (0, 3), (3, 150)))
        less = model.condition(x[:, 1:], y[:, 1:])
        wanted = [
            answer(model, state, xt) for state in (whole, whole, whole, less, first.decay(-0.7).merge(rest))
        ]
    assert got["done"]
    assert got["bytes"] == whole.nbytes
    for its, mine in zip(got["answers"], wanted, strict=True):
        for numbers, reference in zip(its, mine, strict=True):
            same(numbers, reference)


def test_the_committed_kernels_are_those_of_the_source(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    assert build(tmp_path / "kernels.wasm") == (WEB / "kernels.wasm").read_bytes()


DIGIT = """async () => {
    const tab = await constmem.open("digit");
    tab.show();
    return [tab.stream.points.map((point) => point.at), [...tab.prediction.mean], [...tab.prediction.std]];
}"""


def test_pixels_are_revealed_drawn_replaced_merged_and_rewound(site: tuple[Path, str], shown: Shown) -> None:
    page = shown()
    box = page.locator('[data-id="seen"]').bounding_box()
    page.mouse.click(box["x"] + 5, box["y"] + 5)
    page.check('input[value="ink"]')
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.check('input[value="paper"]')
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    points, *_ = page.evaluate(DIGIT)
    assert points == [[-1.0, -1.0, -0.5], [pytest.approx(1 / 27), pytest.approx(1 / 27), -0.5]]  # replaced
    page.click('[data-id="more"]')
    page.check('input[name="drawing"][value="B"]')
    page.click('[data-id="more"]')
    page.click('[data-id="merge"]')
    points, mean, std = page.evaluate(DIGIT)
    assert len(points) == 42
    model = saved(site[0] / "models" / "emnist")
    grid = torch.linspace(-1, 1, 28)
    xt = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).reshape(1, -1, 2)
    x, y = torch.tensor([points]).split([2, 1], -1)
    with torch.no_grad():
        for numbers, mine in zip((mean, std), answer(model, model.condition(x, y), xt), strict=True):
            same(numbers, mine)
        page.fill('[data-id="slider"]', "7")
        _, mean, _ = page.evaluate(DIGIT)
        before = answer(model, model.condition(x[:, :7], y[:, :7]), xt)[0]
    same(mean, before)
    assert page.inner_text('#panel-digit [data-id="count"]') == "7 of 42"
    places = ((27 * (x[0, :7] + 1) / 2).round() @ torch.tensor([[28.0], [1.0]]))[:, 0].long()
    off = (torch.tensor(mean)[places] - y[0, :7, 0]).abs().mean()
    assert page.inner_text('#panel-digit [data-id="off"]') == f"{off:.3f}"


def test_a_whole_digit_is_predicted_as_it_was_shown(shown: Shown) -> None:
    """As well as real digits are: the 5 that is hidden first stays open."""
    page = shown()
    page.click('[data-id="all"]')
    points, mean, _ = page.evaluate(DIGIT)
    off = [abs(mean[round(13.5 * (x + 1)) * 28 + round(13.5 * (y + 1))] - level) for x, y, level in points]
    assert len(off) == 784
    assert sum(miss < 0.25 for miss in off) > 0.98 * 784
    assert page.inner_text('#panel-digit [data-id="off"]') == f"{sum(off) / 784:.3f}"


def test_a_pixel_of_both_drawings_is_replaced_as_one(shown: Shown) -> None:
    page = shown()
    box = page.locator('[data-id="seen"]').bounding_box()
    for drawing in "AB":
        page.check(f'input[name="drawing"][value="{drawing}"]')
        page.mouse.click(box["x"] + 100, box["y"] + 100)
    page.click('[data-id="merge"]')
    assert len(page.evaluate(DIGIT)[0]) == 2
    page.check('input[value="ink"]')
    page.mouse.click(box["x"] + 100, box["y"] + 100)
    assert [at[2] for at in page.evaluate(DIGIT)[0]] == [0.5]


def test_a_fast_stroke_has_no_gaps(shown: Shown) -> None:
    page = shown()
    page.check('input[value="ink"]')
    box = page.locator('[data-id="seen"]').bounding_box()
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + box["height"] - 5)  # in one step
    page.mouse.up()
    page.mouse.click(box["x"] + 5, box["y"] + 5)  # another stroke: nothing lies between
    points, *_ = page.evaluate(DIGIT)
    assert len(points) == 29
    assert sorted(at[0] for at in points[:28]) == pytest.approx([2 * row / 27 - 1 for row in range(28)])


def test_no_click_is_lost_however_fast_they_come(shown: Shown) -> None:
    page = shown()
    page.evaluate("""() => {
        const seen = document.querySelector('[data-id="seen"]'), box = seen.getBoundingClientRect();
        for (let i = 0; i < 200; i++) {
            const place = { clientX: box.left + ((i % 28) + 0.5) * box.width / 28,
                            clientY: box.top + (Math.floor(i / 28) + 0.5) * box.height / 28, pointerId: 1 };
            seen.setPointerCapture = () => {};
            seen.dispatchEvent(new PointerEvent("pointerdown", place));
        }
    }""")
    assert len(page.evaluate(DIGIT)[0]) == 200


CURVE = """async () => {
    const tab = await constmem.open("curve");
    tab.show();
    const { points, faded } = tab.stream;
    return [points.map((point) => [point.at, point.born - faded]), [...tab.prediction.mean]];
}"""


def test_a_curve_gains_loses_and_forgets_points(site: tuple[Path, str], shown: Shown) -> None:
    page = shown(tab="curve", width=390)
    page.fill('[data-id="fade"]', "20")
    box = page.locator('[data-id="plot"]').bounding_box()
    for across, down in ((0.3, 0.4), (0.6, 0.5), (0.8, 0.2)):
        page.touchscreen.tap(box["x"] + across * box["width"], box["y"] + down * box["height"])
    page.touchscreen.tap(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])  # again: removes
    points, mean = page.evaluate(CURVE)
    assert len(points) == 6
    assert [born for _, born in points] == pytest.approx([-0.6694] * 4 + [-0.4463, 0.0], abs=1e-4)
    model = saved(site[0] / "models" / "gp")
    x, y = torch.tensor([[at for at, _ in points]]).split(1, -1)
    xt = torch.linspace(-2, 2, 121)[None, :, None]
    weight = torch.tensor([[born for _, born in points]])
    with torch.no_grad():
        wanted = answer(model, model.observe(x, y, log_weight=weight), xt)[0]
    same(mean, wanted)
    memory = page.inner_text('#panel-curve [data-id="memory"]')
    page.click('[data-id="thousand"]')
    page.wait_for_function("document.getElementById('status').textContent.startsWith('1,000 points came')")
    assert page.inner_text('#panel-curve [data-id="memory"]') == memory
    assert page.inner_text('#panel-curve [data-id="count"]') == "1,000"


def test_a_click_removes_no_point_that_has_faded_away(shown: Shown) -> None:
    page = shown(tab="curve")
    page.fill('[data-id="fade"]', "30")
    box = page.locator('[data-id="plot"]').bounding_box()
    for across in range(12):
        page.mouse.click(box["x"] + 20 + 50 * across, box["y"] + 20)
    assert len(page.evaluate(CURVE)[0]) == 16
    page.mouse.click(box["x"] + 20, box["y"] + 20)  # where the first of them was
    assert len(page.evaluate(CURVE)[0]) == 17
    page.mouse.click(box["x"] + 20, box["y"] + 20)  # which is the new one
    assert len(page.evaluate(CURVE)[0]) == 16


def test_a_picture_stays_where_a_finger_aims_on_a_phone(shown: Shown) -> None:
    page = shown(tab="curve", width=360)
    places = set()
    for said in ("Ready. Nothing you do here leaves this browser.", "Added.", "1000 points came; no more."):
        page.evaluate("(text) => { document.getElementById('status').textContent = text; }", said)
        places.add(page.locator('[data-id="plot"]').bounding_box()["y"])
    assert len(places) == 1


def test_the_right_button_draws_nothing_and_a_tab_says_nothing_of_the_other(shown: Shown) -> None:
    page = shown(tab="curve")
    for tab, name, script, before in (("curve", "plot", CURVE, 4), ("digit", "seen", DIGIT, 0)):
        page.click(f"#tab-{tab}")
        box = page.locator(f'[data-id="{name}"]').bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 20)
        page.mouse.down(button="right")
        page.mouse.move(box["x"] + 220, box["y"] + 40)
        page.mouse.up(button="right")
        assert len(page.evaluate(script)[0]) == before
    page.click('[data-id="more"]')
    page.click("#tab-curve")
    assert page.inner_text("#status") == ""


def test_the_open_tab_shows_where_colours_are_forced(shown: Shown) -> None:
    page = shown()
    page.emulate_media(forced_colors="active")
    width = "(name) => getComputedStyle(document.getElementById(`tab-${name}`)).borderTopWidth"
    assert [page.evaluate(width, name) for name in ("digit", "curve")] == ["3px", "1px"]


def test_keys_alone_are_enough(shown: Shown) -> None:
    page = shown()
    page.focus('[data-id="seen"]')
    for key in ("ArrowUp", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    points, *_ = page.evaluate(DIGIT)
    assert [at[:2] for at in points] == [[pytest.approx(-1 / 27), pytest.approx(-1 / 27)]]
    assert page.inner_text("#status") == "Row 14, column 14 shown. 1 pixel seen."
    page.keyboard.press("ArrowDown")
    _, mean, std = page.evaluate(DIGIT)
    said = f"Row 15, column 14: {mean[14 * 28 + 13] + 0.5:.2f} predicted, unsure by {std[14 * 28 + 13]:.2f}"
    assert page.inner_text("#status") == said
    page.focus("#tab-digit")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(READY.format("curve"))
    page.focus('[data-id="plot"]')
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    level = page.evaluate(CURVE)[1][60]
    assert page.inner_text("#status").startswith(f"x 0.00, y 0.00: {level:.2f} predicted, unsure by 0.")
    page.keyboard.press("Enter")
    assert len(page.evaluate(CURVE)[0]) == 5
    page.keyboard.press("Enter")
    assert len(page.evaluate(CURVE)[0]) == 4
    unnamed = page.locator("button:not([aria-label]):empty, canvas:not([aria-label])")
    assert unnamed.count() == 0


def test_all_is_small_and_comes_from_this_server(site: tuple[Path, str], shown: Shown) -> None:
    page = shown(tab="curve")
    found = page.evaluate("performance.getEntriesByType('resource').map((e) => [e.name, e.transferSize])")
    assert all(name.startswith((site[1], "data:")) for name, _ in found)
    assert 3_000_000 < sum(size for _, size in found) < 4_000_000  # of both tabs


def damaged(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


def inside(change: Any) -> Any:
    """A change of what gzip holds; nothing compresses it again, as some servers hand it out."""
    return lambda content: change(bytearray(gzip.decompress(content)))


def another_version(content: bytearray) -> bytearray:
    return content.replace(b'"version":"1s"', b'"version":"9s"')


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (WEIGHTS, damaged, "model.safetensors.gz is damaged: it cannot be unpacked"),
        (WEIGHTS, lambda content: content[:9000], "model.safetensors.gz is damaged: it cannot be unpacked"),
        (WEIGHTS, inside(damaged), "model.safetensors is damaged: its checksum"),
        (WEIGHTS, inside(another_version), "is of format version 9, but this page reads version 1"),
        (WEIGHTS, inside(lambda whole: whole[:100]), "model.safetensors is damaged: it is cut short"),
        (WEIGHTS, lambda _: None, "could not be fetched (404)"),
        ("config.json", lambda _: b'{"model": "cnp", "config": {}}', 'a model of kind "cnp"'),
        (
            "config.json",
            lambda content: content.replace(b'depth": 6', b'depth": 7'),
            "config.json is not the one that was saved with these weights",
        ),
        (
            "config.json",
            lambda content: content.replace(b'heads": 4', b'heads": 2'),  # fits, and predicts otherwise
            "config.json is not the one that was saved with these weights",
        ),
        ("config.json", lambda _: b'{"model": "cmanp"}', "models/emnist holds no model"),
        ("config.json", lambda content: content.replace(b'"std"', b'"stt"'), "does not know: stt"),
        ("config.json", lambda _: b"{", "config.json is damaged: it is no JSON"),
        ("../../kernels.wasm", lambda content: content[:9000], "kernels.wasm is damaged"),
        ("../../kernels.wasm", lambda _: None, "kernels.wasm could not be fetched (404)"),
        ("../../layers.js", lambda _: None, "part of the page could not be fetched"),
    ],
)
def test_weights_that_are_no_good_are_named_in_plain_words(
    name: str, change: Any, words: str, site: tuple[Path, str], shown: Shown
) -> None:
    path = site[0] / "models" / "emnist" / name
    content = path.read_bytes()
    new = change(bytearray(content))
    try:
        path.unlink() if new is None else path.write_bytes(new)
        page = shown(tab=None)
        page.wait_for_selector("#alert:not([hidden])")
        assert words in page.inner_text("#alert")
        assert page.locator("#panel-digit").get_attribute("inert") is not None
    finally:
        path.write_bytes(content)


def test_a_tab_that_failed_is_tried_again_and_the_other_keeps_its_drawing(
    site: tuple[Path, str], shown: Shown
) -> None:
    path = site[0] / "models" / "gp" / WEIGHTS
    content = path.read_bytes()
    page = shown()
    page.click('[data-id="more"]')
    try:
        path.unlink()
        page.click("#tab-curve")
        page.wait_for_selector("#alert:not([hidden])")
    finally:
        path.write_bytes(content)
    page.click("#tab-digit")
    assert page.is_hidden("#alert")
    assert len(page.evaluate(DIGIT)[0]) == 20
    page.click("#tab-curve")
    page.wait_for_selector(READY.format("curve"))
    assert page.is_hidden("#alert")


def test_a_model_that_fits_no_tab_is_named(site: tuple[Path, str], shown: Shown) -> None:
    models = site[0] / "models"
    (models / "emnist").rename(models / "kept")
    shutil.copytree(models / "gp", models / "emnist")
    try:
        page = shown(tab=None)
        page.wait_for_selector("#alert:not([hidden])")
        wanted = "models/emnist holds a model from 1 to 1 numbers, but this tab needs one from 2 to 1"
        assert wanted in page.inner_text("#alert")
    finally:
        shutil.rmtree(models / "emnist")
        (models / "kept").rename(models / "emnist")


def test_a_browser_without_simd_is_told_so(shown: Shown) -> None:
    page = shown(tab=None, script="WebAssembly.validate = () => false")
    page.wait_for_selector("#alert:not([hidden])")
    assert "no WebAssembly SIMD" in page.inner_text("#alert")


def test_a_browser_that_cannot_unpack_is_not_told_of_damage(shown: Shown) -> None:
    page = shown(tab=None, script="delete window.DecompressionStream")
    page.wait_for_selector("#alert:not([hidden])")
    assert "no DecompressionStream" in page.inner_text("#alert")


def test_a_page_opened_as_a_file_says_that_it_needs_a_server(site: tuple[Path, str], browser: Any) -> None:
    with closing(browser.new_page()) as page:
        page.goto((site[0] / "index.html").as_uri())
        page.wait_for_selector("#alert:not([hidden])")
        assert "constmem page" in page.inner_text("#alert")
        assert page.inner_text("#status") == ""


def test_a_port_that_is_taken_is_answered_with_advice(tmp_path: Path) -> None:
    with hosted(tmp_path) as first, pytest.raises(OSError, match="in use") as caught:
        hosted(tmp_path, first.server_port).__enter__()
    assert "take another --port" in advice_on(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_page_that_is_ended_leaves_no_folder(number: int, tmp_path: Path) -> None:
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # jobs ignore it
    command = [sys.executable, "-c", f"{heard}; from constmem.cli import main; main()", "page", "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("the page: http://127.0.0.1:")
        assert list(tmp_path.glob("constmem-page-*"))
        running.send_signal(number)
        try:
            assert running.wait(60) == 0
        finally:
            running.kill()
    assert not list(tmp_path.glob("constmem-page-*"))


def test_tabs_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tab 'cats'"):
        write_page(tmp_path, {"cats": "emnist"})
    with pytest.raises(ValueError, match=r"gp has .* \(1, 1\), but the tab 'emnist' needs \(2, 1\)"):
        write_page(tmp_path, {"emnist": "gp"})
    assert list(tmp_path.iterdir()) == []
