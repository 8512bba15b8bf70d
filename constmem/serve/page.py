"""The page that learns in the browser: its files and small weights, in a folder for any web server."""

import gzip
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from constmem.neural_processes import CMANP

WEB = Path(__file__).parent / "web"
SUFFIXES = (".html", ".css", ".js", ".wasm")
TABS = {"emnist": "emnist", "gp": "gp"}  # the folders that the page fetches weights from
INPUTS = {"emnist": 2, "gp": 1}  # numbers that say where a pixel or point is; what is there is one number
STEPS = 64  # that a row's deviation is long, at least: weights are whole numbers of steps, and compress well


def write_page(out: Path, models: Mapping[str, str | Path] | None = None) -> Path:
    """Write the page into a folder, with the weights of both tabs rounded and compressed.

    Args:
        out: any web server can show this folder; it needs nothing but to hand out files.
        models: other weights than those that come with the package, as `from_pretrained` takes them, by tab:
            "emnist" (images of 28x28 grey pixels) and "gp" (functions of one number).
    """
    from constmem.neural_processes import CMANP

    chosen = TABS | dict(models or {})
    if unknown := sorted(set(chosen) - set(TABS)):
        raise ValueError(f"the page has no tab {unknown[0]!r}: it has {', '.join(TABS)}")
    loaded = {tab: CMANP.from_pretrained(source) for tab, source in chosen.items()}  # refused before writing
    for tab, model in loaded.items():
        found = model.config["dim_x"], model.config["dim_y"]
        if found != (wanted := (INPUTS[tab], 1)):
            raise ValueError(f"{chosen[tab]} has (dim_x, dim_y) {found}, but the tab {tab!r} needs {wanted}")
    for path in sorted(WEB.iterdir()):
        if path.suffix in SUFFIXES:
            _copy(path, out / path.name)
    for tab, model in loaded.items():
        round_weights(model)
        write_model(model, out / "models" / tab)
    return out


def round_weights(model: "CMANP") -> None:
    """Round weights, in place: to float16, and those of a matrix to steps of their row's own size.

    What regressions are made of, and units, are small and want their digits: they stay as they are.
    """
    keep = {n: t.clone() for n, t in model.state_dict().items() if n.startswith(("regression.", "scales."))}
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and name not in keep:
            rows = weight.detach().flatten(1)
            deviation = rows.std(1, keepdim=True, correction=0).clamp_min(1e-6)
            step = deviation.log2().floor().exp2() / STEPS  # a power of two: multiples are exact in float16
            rows.copy_((rows / step).round() * step)
    model.half()
    model.load_state_dict(model.state_dict() | keep, assign=True)


def write_model(model: "CMANP", folder: Path) -> None:
    """Save a model as the page fetches it: config.json, and model.safetensors through gzip."""
    from constmem.core.files import write_bytes

    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        for path in sorted(Path(made).iterdir()):
            if path.suffix == ".json":
                _copy(path, folder / path.name)
            else:
                write_bytes(folder / f"{path.name}.gz", gzip.compress(path.read_bytes(), 9, mtime=0))


def _copy(path: Path, to: Path) -> None:
    from constmem.core.files import write_bytes

    write_bytes(to, path.read_bytes())


class _Handler(SimpleHTTPRequestHandler):
    """Files with the types that browsers insist on, compressed nowhere, logged nowhere."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript", ".wasm": "application/wasm", ".safetensors": "application/octet-stream",
    }  # fmt: skip

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def hosted(folder: Path, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """A server of a folder on this machine alone; port 0 takes any that is free."""
    with ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder))) as server:
        yield server


def show_page(port: int) -> None:
    """Write the page to a temporary folder, and serve it until this is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that no folder is left
    with (
        tempfile.TemporaryDirectory(prefix="constmem-page-") as folder,
        hosted(write_page(Path(folder)), port) as server,
        suppress(KeyboardInterrupt),
    ):
        print(f"the page: http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
