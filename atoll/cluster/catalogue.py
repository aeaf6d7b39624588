"""Known devices: what the vendor says they can do at most, and where that is written.

Rates are dense (no structured sparsity), with float32 accumulation, at boost clock: what a stream of instructions
without gaps would reach. Consumer cards run float16 with float32 accumulation at half the rate of float16 accumulation;
training accumulates in float32, so that half is listed. ``float32`` is true float32 (PyTorch's default); ``tfloat32`` is
what the matrix units do when allowed. A dtype without units of its own (bfloat16 on Volta and Turing) runs at the
float32 rate.

Efficiency is where a guess begins: the fraction of the peak that the operators of a transformer reach, set per family
from published model FLOP/s utilisation; a profile of the machine replaces it. Prices are guesses too.
"""

from __future__ import annotations

import re

import msgspec

from atoll.cluster.cluster import Device
from atoll.errors import ClusterError
from atoll.records import Record
from atoll.units import Bandwidth, Bytes, Duration, FlopRate

__all__ = ["DEVICES", "DTYPES", "PRICE_NOTE", "Entry", "entry", "find", "memory_rate", "peak", "resolve"]

PRICE_NOTE = "prices per hour are guesses (US dollars, market places in mid-2025; a computer of your own: its wear)"

DTYPES = {
    "fp64": "float64", "fp32": "float32", "tf32": "tfloat32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8",
    "float64": "float64", "float32": "float32", "tfloat32": "tfloat32", "bfloat16": "bfloat16", "float16": "float16",
    "float8": "float8",
}
"""Names people write for a dtype, and ours."""

_T, _GB = 10**12, 10**9
_GPU_LAUNCH_NS = 100_000
_CPU_LAUNCH_NS = 200_000


class Entry(Record):
    """One known device. ``teraflops``: by dtype, dense. ``memory_gib`` (GiB), ``bandwidth_gb`` (GB/s), ``watts`` (board).

    ``launch_ns``: fixed cost of one instruction (a stage's pass: the host's work before the device is busy).
    ``price``: dollars per hour, a guess (``PRICE_NOTE``). ``source``: the vendor's paper that the figures are from.
    """

    teraflops: dict[str, float]
    memory_gib: float
    bandwidth_gb: float
    watts: float
    efficiency: float
    price: float
    source: str
    launch_ns: int = _GPU_LAUNCH_NS
    aliases: tuple[str, ...] = ()


def _rates(fp64: float, fp32: float, tf32: float, bf16: float, fp16: float) -> dict[str, float]:
    """0: the device has no units for it."""
    named = {"float64": fp64, "float32": fp32, "tfloat32": tf32, "bfloat16": bf16, "float16": fp16}
    return {dtype: rate for dtype, rate in named.items() if rate}


def _gpu(rates: dict[str, float], memory: float, bandwidth: float, watts: float, efficiency: float,
         price: float, source: str, *aliases: str) -> Entry:
    return Entry(teraflops=rates, memory_gib=memory, bandwidth_gb=bandwidth, watts=watts, efficiency=efficiency,
                 price=price, source=source, aliases=aliases)


# Efficiency by family, from published utilisation: A100 0.50-0.57 (Megatron-LM, 2021; selective recomputation, 2022),
# H100 0.38-0.43 (Llama 3, 2024), V100 and cards without fast host links lower; MI300X below H100 in comparisons.
_EFFICIENCY = {"volta": 0.40, "turing": 0.35, "ampere": 0.50, "ada": 0.45, "hopper": 0.42, "blackwell": 0.38,
               "ampere-consumer": 0.55, "ada-consumer": 0.55, "blackwell-consumer": 0.50, "cdna2": 0.35, "cdna3": 0.32,
               "rdna3": 0.30, "apple": 0.55, "cpu": 0.60}

# The columns of _rates: float64, float32, tfloat32, bfloat16, float16 in TFLOP/s; then GiB, GB/s, W, efficiency, $/h.
DEVICES: dict[str, Entry] = {
    # --- NVIDIA, data centre ---
    "P100": _gpu(_rates(5.3, 10.6, 0, 10.6, 21.2), 16, 732, 300, 0.45, 0.25,
                 "NVIDIA Tesla P100 data sheet (SXM2)", "Tesla P100-SXM2-16GB", "P100-16"),
    "V100": _gpu(_rates(7.8, 15.7, 0, 15.7, 125), 16, 900, 300, _EFFICIENCY["volta"], 0.30,
                 "NVIDIA V100 data sheet (SXM2, 16 GB)", "V100-16", "Tesla V100-SXM2-16GB", "V100-SXM2"),
    "V100-32": _gpu(_rates(7.8, 15.7, 0, 15.7, 125), 32, 900, 300, _EFFICIENCY["volta"], 0.40,
                    "NVIDIA V100 data sheet (SXM2, 32 GB)", "Tesla V100-SXM2-32GB"),
    "V100-PCIe": _gpu(_rates(7.0, 14.0, 0, 14.0, 112), 16, 900, 250, _EFFICIENCY["volta"], 0.28,
                      "NVIDIA V100 data sheet (PCIe, 16 GB)", "Tesla V100-PCIE-16GB"),
    "T4": _gpu(_rates(0.25, 8.1, 0, 8.1, 65), 16, 320, 70, _EFFICIENCY["turing"], 0.20,
               "NVIDIA T4 data sheet (float64: 1/32 of float32, Turing white paper)", "Tesla T4"),
    "A10": _gpu(_rates(0.49, 31.2, 62.5, 125, 125), 24, 600, 150, _EFFICIENCY["ampere"], 0.55,
                "NVIDIA A10 data sheet (float64: 1/64, GA102 white paper)", "A10G"),
    "A40": _gpu(_rates(0.58, 37.4, 74.8, 149.7, 149.7), 48, 696, 300, _EFFICIENCY["ampere"], 0.45,
                "NVIDIA A40 data sheet (float64: 1/64, GA102 white paper)"),
    "RTX-A6000": _gpu(_rates(0.60, 38.7, 77.4, 154.8, 154.8), 48, 768, 300, _EFFICIENCY["ampere"], 0.50,
                      "NVIDIA RTX A6000 data sheet", "A6000"),
    "A100-40": _gpu(_rates(19.5, 19.5, 156, 312, 312), 40, 1555, 400, _EFFICIENCY["ampere"], 1.10,
                    "NVIDIA A100 data sheet (SXM4 40 GB; float64 on tensor cores)", "A100-SXM4-40GB", "A100-PCIE-40GB",
                    "A100-40GB"),
    "A100-80": _gpu(_rates(19.5, 19.5, 156, 312, 312), 80, 2039, 400, _EFFICIENCY["ampere"], 1.60,
                    "NVIDIA A100 data sheet (SXM4 80 GB; float64 on tensor cores)", "A100-SXM4-80GB", "A100-80GB"),
    "A100-80-PCIe": _gpu(_rates(19.5, 19.5, 156, 312, 312), 80, 1935, 300, _EFFICIENCY["ampere"], 1.45,
                         "NVIDIA A100 data sheet (PCIe 80 GB)", "A100 80GB PCIe"),
    "L4": _gpu(_rates(0.47, 30.3, 60, 121, 121), 24, 300, 72, _EFFICIENCY["ada"], 0.45,
               "NVIDIA L4 data sheet (printed with sparsity: halved; float64: 1/64)"),
    "L40": _gpu(_rates(1.41, 90.5, 90.5, 181, 181), 48, 864, 300, _EFFICIENCY["ada"], 0.75,
                "NVIDIA L40 data sheet (float64: 1/64)"),
    "L40S": _gpu(_rates(1.43, 91.6, 183, 362, 362), 48, 864, 350, _EFFICIENCY["ada"], 0.85,
                 "NVIDIA L40S data sheet (dense column; float64: 1/64)"),
    "H100-SXM": _gpu(_rates(67, 67, 494.7, 989.4, 989.4), 80, 3350, 700, _EFFICIENCY["hopper"], 2.50,
                     "NVIDIA H100 data sheet (SXM5; printed with sparsity: halved; float64 on tensor cores)", "H100",
                     "H100-SXM5", "H100 80GB HBM3"),
    "H100-PCIe": _gpu(_rates(51, 51, 378, 756, 756), 80, 2000, 350, _EFFICIENCY["hopper"], 2.10,
                      "NVIDIA H100 data sheet (PCIe; printed with sparsity: halved)", "NVIDIA H100 PCIe"),
    "H200": _gpu(_rates(67, 67, 494.7, 989.4, 989.4), 140, 4800, 700, _EFFICIENCY["hopper"], 3.20,
                 "NVIDIA H200 data sheet (SXM; printed with sparsity: halved)", "H200-SXM"),
    "B200": _gpu(_rates(37, 75, 1125, 2250, 2250), 179, 7700, 1000, _EFFICIENCY["blackwell"], 4.50,
                 "NVIDIA HGX B200 data sheet, an eighth of the board (printed with sparsity: halved)"),
    # --- NVIDIA, consumer (Founders Edition clocks; bfloat16 and float16 with float32 accumulation) ---
    "RTX-2080-Ti": _gpu(_rates(0.44, 14.2, 0, 14.2, 56.9), 11, 616, 260, _EFFICIENCY["turing"], 0.10,
                        "NVIDIA Turing white paper, table of GeForce RTX 2080 Ti"),
    "RTX-3060": _gpu(_rates(0.20, 12.7, 12.7, 25.5, 25.5), 12, 360, 170, _EFFICIENCY["ampere-consumer"], 0.07,
                     "GeForce RTX 3060 specification (12 GB): 3584 cores x 1.777 GHz; ratios of the GA102 white paper"),
    "RTX-3080": _gpu(_rates(0.47, 29.8, 29.8, 59.5, 59.5), 10, 760, 320, _EFFICIENCY["ampere-consumer"], 0.13,
                     "NVIDIA GA102 white paper, table of GeForce RTX 3080 (10 GB)"),
    "RTX-3090": _gpu(_rates(0.56, 35.6, 35.6, 71.2, 71.2), 24, 936, 350, _EFFICIENCY["ampere-consumer"], 0.20,
                     "NVIDIA GA102 white paper, table of GeForce RTX 3090"),
    "RTX-4080": _gpu(_rates(0.76, 48.7, 48.7, 97.5, 97.5), 16, 717, 320, _EFFICIENCY["ada-consumer"], 0.25,
                     "NVIDIA Ada white paper, table of GeForce RTX 4080"),
    "RTX-4090": _gpu(_rates(1.29, 82.6, 82.6, 165.2, 165.2), 24, 1008, 450, _EFFICIENCY["ada-consumer"], 0.35,
                     "NVIDIA Ada white paper, table of GeForce RTX 4090"),
    "RTX-5090": _gpu(_rates(1.64, 104.8, 104.8, 209.5, 209.5), 32, 1792, 575, _EFFICIENCY["blackwell-consumer"], 0.60,
                     "NVIDIA RTX Blackwell white paper, table of GeForce RTX 5090"),
    # --- AMD ---
    "MI250": _gpu(_rates(90.5, 90.5, 0, 362.1, 362.1), 128, 3277, 560, _EFFICIENCY["cdna2"], 1.00,
                  "AMD Instinct MI250 data sheet (the card; PyTorch shows it as two devices: kind MI250-GCD, count 2)"),
    "MI250-GCD": _gpu(_rates(45.3, 45.3, 0, 181, 181), 64, 1638, 280, _EFFICIENCY["cdna2"], 0.50,
                      "AMD Instinct MI250 data sheet, half of the card", "AMD Instinct MI250X/MI250"),
    "MI300X": _gpu(_rates(163.4, 163.4, 653.7, 1307.4, 1307.4), 192, 5300, 750, _EFFICIENCY["cdna3"], 2.30,
                   "AMD Instinct MI300X data sheet (dense)", "AMD Instinct MI300X"),
    "RX-7900-XTX": _gpu(_rates(1.9, 61.4, 0, 122.8, 122.8), 24, 960, 355, _EFFICIENCY["rdna3"], 0.20,
                        "AMD Radeon RX 7900 XTX specification", "Radeon RX 7900 XTX"),
}


def _apple(teraflops: float, memory_gib: float, bandwidth_gb: float, watts: float, price: float,
           source: str) -> Entry:
    """Apple GPUs run float16 and bfloat16 at the float32 rate and have no float64. Memory is shared with the CPU:
    three quarters of the size named in ``source``, which is what Metal lets a process keep resident."""
    return Entry(teraflops=_rates(0, teraflops, 0, teraflops, teraflops), memory_gib=memory_gib * 0.75,
                 bandwidth_gb=bandwidth_gb, watts=watts, efficiency=_EFFICIENCY["apple"], price=price, source=source)


_CORES = "cores x 128 lanes x 2 x clock, clock as measured by others"
DEVICES |= {
    "M1": _apple(2.6, 16, 68, 20, 0.03, "Apple newsroom, M1 (2020): 2.6 teraflops, 8-core GPU, 16 GB"),
    "M1-Pro": _apple(5.2, 32, 200, 30, 0.06, "Apple newsroom, M1 Pro (2021): 5.2 teraflops, 16-core GPU, 32 GB"),
    "M1-Max": _apple(10.4, 64, 400, 60, 0.09, "Apple newsroom, M1 Max (2021): 10.4 teraflops, 32-core GPU, 64 GB"),
    "M1-Ultra": _apple(20.8, 128, 800, 110, 0.17, "Apple newsroom, M1 Ultra (2022): two M1 Max, 128 GB"),
    "M2": _apple(3.6, 24, 100, 22, 0.04, "Apple newsroom, M2 (2022): 3.6 teraflops, 10-core GPU, 24 GB"),
    "M2-Max": _apple(13.6, 96, 400, 65, 0.11, f"38-core GPU: {_CORES} (1.398 GHz); Apple: 400 GB/s, 96 GB"),
    "M2-Ultra": _apple(27.2, 192, 800, 120, 0.21, "Apple newsroom, M2 Ultra (2023): 27.2 teraflops, 192 GB"),
    "M3": _apple(3.6, 24, 100, 22, 0.05, f"10-core GPU: {_CORES} (1.398 GHz); Apple: 100 GB/s, 24 GB"),
    "M3-Max": _apple(14.3, 128, 400, 70, 0.14, f"40-core GPU: {_CORES} (1.398 GHz); Apple: 400 GB/s, 128 GB"),
    "M3-Ultra": _apple(28.6, 512, 819, 140, 0.35, f"80-core GPU: {_CORES} (1.398 GHz); Apple: 819 GB/s, 512 GB"),
    "M4": _apple(4.0, 32, 120, 22, 0.05, f"10-core GPU: {_CORES} (1.578 GHz); Apple: 120 GB/s, 32 GB"),
    "M4-Pro": _apple(8.1, 64, 273, 45, 0.08, f"20-core GPU: {_CORES} (1.578 GHz); Apple: 273 GB/s, 64 GB"),
    "M4-Max": _apple(16.2, 128, 546, 75, 0.16, f"40-core GPU: {_CORES} (1.578 GHz); Apple: 546 GB/s, 128 GB"),
    "cpu-core": Entry(teraflops={"float64": 0.04, "float32": 0.08, "bfloat16": 0.02, "float16": 0.02}, memory_gib=4,
                      bandwidth_gb=10, watts=8, efficiency=_EFFICIENCY["cpu"], price=0.03, launch_ns=_CPU_LAUNCH_NS,
                      source="one x86 core with AVX2: 2 FMA x 8 lanes x 2 x 2.5 GHz (Intel optimization manual); 16-bit "
                             "types are converted, about a quarter; memory and its rate: share of a small server",
                      aliases=("cpu", "core")),
}


def _plain(name: str) -> str:
    """ "NVIDIA GeForce RTX 3090", "rtx3090" and "RTX-3090" are one name."""
    return re.sub(r"nvidia|geforce|laptop gpu|apple|[^a-z0-9]", "", name.lower())


def find(kind: str) -> str | None:
    """The catalogue's name for a device as people or drivers call it; None when it is not known."""
    wanted = _plain(kind)
    for name, known in DEVICES.items():
        if wanted in (_plain(name), *map(_plain, known.aliases)):
            return name
    return None


def entry(kind: str) -> Entry:
    """Raises ``ClusterError`` with near names when ``kind`` is not in the catalogue."""
    name = find(kind)
    if name is not None:
        return DEVICES[name]
    import difflib

    by_plain = {_plain(known): known for known in DEVICES}
    matches = [by_plain[match] for match in difflib.get_close_matches(_plain(kind), by_plain, n=4, cutoff=0.4)]
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    raise ClusterError(f"device kind {kind!r} is not in the catalogue; {hint}known: {', '.join(DEVICES)}; or give "
                       "flops, memory and memory_bandwidth yourself (atoll probe measures them)")


def resolve(device: Device) -> Device:
    """``device`` with every field filled: what the document gives, else the catalogue. ``speed`` and ``count`` stay as
    they are and nothing is multiplied by them. dtype names become ours ("bf16" -> "bfloat16").

    A kind the catalogue does not know is accepted when flops, memory and memory_bandwidth are given; its missing
    figures are then those of a CPU core. Raises ``ClusterError`` otherwise, and for an unknown dtype.
    """
    given: dict[str, FlopRate] = {}
    for dtype, rate in device.flops.items():
        if dtype not in DTYPES:
            raise ClusterError(f"flops of {device.kind}: unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
        given[DTYPES[dtype]] = rate
    measured = bool(given) and device.memory is not None and device.memory_bandwidth is not None
    known = DEVICES["cpu-core"] if measured and find(device.kind) is None else entry(device.kind)
    listed = {} if known is not DEVICES.get(find(device.kind) or "") else {
        dtype: FlopRate(round(rate * _T)) for dtype, rate in known.teraflops.items()}
    return msgspec.structs.replace(
        device,
        memory=Bytes(round(known.memory_gib * 2**30)) if device.memory is None else device.memory,
        flops={**listed, **given},
        memory_bandwidth=(Bandwidth(round(known.bandwidth_gb * _GB)) if device.memory_bandwidth is None
                          else device.memory_bandwidth),
        efficiency=known.efficiency if device.efficiency is None else device.efficiency,
        launch=Duration(known.launch_ns) if device.launch is None else device.launch,
        watts=known.watts if device.watts is None else device.watts,
        price_per_hour=known.price if device.price_per_hour is None else device.price_per_hour,
    )


def peak(device: Device, dtype: str) -> int:
    """FLOP/s that ``device`` reaches at most in ``dtype`` ("bfloat16" or "bf16"), its ``speed`` included,
    ``efficiency`` not. A 16-bit dtype that is not listed runs at the float32 rate. Raises ``ClusterError`` when the
    device cannot do it at all."""
    full = resolve(device)
    name = DTYPES.get(dtype)
    if name is None:
        raise ClusterError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    rate = full.flops.get(name)
    if rate is None and name in ("bfloat16", "float16", "tfloat32"):
        rate = full.flops.get("float32")
    if rate is None:
        raise ClusterError(f"device {device.kind} cannot compute in {name}; it can in {', '.join(full.flops)}: choose "
                           f"one of these or add flops.{name} to the device")
    return round(rate * full.speed)


def memory_rate(device: Device) -> int:
    """Bytes/s to and from the memory of ``device``, its ``speed`` included."""
    return round((resolve(device).memory_bandwidth or 0) * device.speed)
