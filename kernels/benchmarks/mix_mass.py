"""Block masses in bytes: their size, and what making and mixing them costs, one thread. Run: make bench."""

import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from masks import striped_mass
from paired import paired_seconds, setting

from crossfill_kernels import dispatch
from crossfill_kernels.mix_mass import mix_mass, mix_mass_reference, quantise_mass, quantise_mass_reference

ROUNDS = 9
# (sender heads, receiver heads, tokens).
CASES = ((9, 9, 1024), (9, 9, 4096), (16, 16, 20_480))


def main() -> None:
    """Print a table of medians; a result that is wrong is not timed."""
    torch.set_num_threads(1)
    table = Table(title=f"mix_mass: masses of a layer; {setting()}; median of {ROUNDS} paired rounds")
    names = ("heads", "tokens", "size", "of float16", "quantise", "in torch", "mix", "in torch")
    for column in names:
        table.add_column(column, justify="right")
    for senders, receivers, length in track(CASES, description="mix_mass"):
        table.add_row(f"{senders} to {receivers}", str(length), *_row(senders, receivers, length))
    Console().print(table)


def _row(senders: int, receivers: int, length: int) -> list[str]:
    torch.manual_seed(0)
    blocks = length // 64
    mass, weights = striped_mass(senders, blocks), torch.softmax(torch.randn(senders, receivers), dim=0)
    quantised = quantise_mass(mass)
    assert torch.equal(quantised.codes, quantise_mass_reference(mass).codes)
    want = mix_mass_reference(quantised, weights, blocks).mass
    torch.testing.assert_close(mix_mass(quantised, weights, blocks).mass, want, atol=1e-5, rtol=1e-5)
    # A column and a code are a record; a column fits into 16 bits where it is sent.
    size = quantised.codes.numel() * 3 + quantised.offsets.numel() * 4
    causal = senders * blocks * (blocks + 1)  # bytes of the causal half in float16
    taken = paired_seconds(
        {
            "quantise": lambda: quantise_mass(mass),
            "quantise in torch": lambda: quantise_mass_reference(mass),
            "mix": lambda: mix_mass(quantised, weights, blocks),
            "mix in torch": lambda: torch.einsum("kh,krc->hrc", weights, mass.mass),
        },
        ROUNDS,
    )
    times = [f"{statistics.median(seconds) * 1e3:.2f} ms" for seconds in taken.values()]
    return [f"{size / 1e3:.0f} kB", f"{size / causal:.2f}", *times]


if __name__ == "__main__":
    assert dispatch.library.load() is not None, "build the library first: python -m crossfill_kernels.native.build"
    main()
