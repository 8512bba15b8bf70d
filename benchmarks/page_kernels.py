"""Build kernels.wasm, the arithmetic of the page, from kernels.c: python benchmarks/page_kernels.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

from constmem.serve.page import WEB

FUNCTIONS = [
    "matmul",
    "transpose",
    "relu",
    "add",
    "layer_norm",
    "softmax",
    "gate",
    "observe",
    "merge",
    "extend",
    "largest_share",
    "subtract",
    "decay",
    "outer",
    "cholesky",
    "solve",
    "finite",
    "halves",
    "sha256",
]
FLAGS = [
    "-target",
    "wasm32-freestanding",
    "-mcpu=generic+simd128",
    "-O3",
    "-nostdlib",
    "-Wl,--no-entry",
    "-Wl,--strip-all",
]


def build(out: Path) -> bytes:
    """Compile with zig (package ziglang) into a file, and give what it holds; the same bytes every time."""
    exports = [f"-Wl,--export={name}" for name in (*FUNCTIONS, "__heap_base")]
    command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *exports, str(WEB / "kernels.c"), "-o"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.wasm"
        subprocess.run([*command, str(made)], check=True)
        content = made.read_bytes()
    partial = out.with_suffix(".new")
    partial.write_bytes(content)
    partial.replace(out)
    return content


if __name__ == "__main__":
    print(f"kernels.wasm: {len(build(WEB / 'kernels.wasm')):,} bytes")
