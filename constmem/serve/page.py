"""The page that learns in the browser: its files and weights in float16, in a folder for any web server."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WEB = Path(__file__).parent / "web"
SUFFIXES = (".html", ".css", ".js", ".wasm")
TABS = {"emnist": "emnist", "gp": "gp"}  # the folders that the page fetches weights from


def write_page(out: Path, models: Mapping[str, str | Path] | None = None) -> Path:
    """Write the page into a folder, with the weights of both tabs as float16, which halves what is fetched.

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
    for path in sorted(WEB.iterdir()):
        if path.suffix in SUFFIXES:
            _copy(path, out / path.name)
    for tab, model in loaded.items():
        keep = {name: t.clone() for name, t in model.state_dict().items() if _is_fine(name)}
        model.half()
        model.load_state_dict(model.state_dict() | keep, assign=True)
        model.save_pretrained(out / "models" / tab)
    return out


def _is_fine(name: str) -> bool:
    """Whether a weight is small and wants its digits: what regressions are made of, and units."""
    return name.startswith(("regression.", "scales."))


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
    """Write the page to a temporary folder, and serve it until somebody stops this."""
    folder = Path(tempfile.mkdtemp(prefix="constmem-page-"))
    try:
        with hosted(write_page(folder), port) as server:
            print(f"the page: http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
