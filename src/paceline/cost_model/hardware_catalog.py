"""Known devices and links: memory, dense matrix rates and bandwidths from data sheets (pure).

[Note: data sheets] Data sheet figures are converted as follows. Matrix rates are *dense*: those published "with
sparsity" are twice as high, and no training reaches them. GeForce cards multiply 16-bit numbers at half rate if they
accumulate in float32, as training does; that rate is given. Links are *one way*: NVLink figures count both directions,
and Ethernet and InfiniBand are published in bits. Memory is as published, in decimal GB; a driver shows up to 7 % more
(80 GB are 80 GiB there) and reserves some of it.

Published figures are upper bounds. Prefer measured rates (`paceline bench machine`, `paceline bench fit`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError, unknown

__all__ = ["DEVICES", "DTYPES", "INTERCONNECTS", "Device", "Interconnect", "find_device", "find_interconnect"]

DTYPES = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device from its data sheet; see [Note: data sheets].

    Attributes:
        name: such as ``"h100-sxm"``.
        memory_nbytes: of device memory.
        bf16: dense FLOP/s of matrix products, accumulated in float32; None: unsupported.
        fp16: the same for fp16.
        tf32: the same for tf32.
        fp32: FLOP/s without matrix units; None: not published.
        memory_nbytes_per_second: memory bandwidth.
        link: the fastest link between two such devices, a name of `INTERCONNECTS`.
        source: data sheet or white paper.
    """

    name: str
    memory_nbytes: int
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None
    memory_nbytes_per_second: float
    link: str
    source: str

    def flops_per_second(self, dtype: str = "bf16") -> float:
        """Return the dense rate of matrix products.

        Args:
            dtype: one of `DTYPES`.

        Raises:
            UsageError: unknown type, or the device does not support it.

        Example:
            >>> find_device("h100-sxm").flops_per_second() / 1e12
            989.4
        """
        if dtype not in DTYPES:
            raise unknown("number type", dtype, DTYPES)
        rate = getattr(self, dtype)
        if rate is None:
            has = ", ".join(each for each in DTYPES if getattr(self, each) is not None)
            raise UsageError(f"{self.name} has no unit for {dtype}", remedy=f"it has: {has}")
        return rate


@dataclass(frozen=True)
class Interconnect:
    """A kind of link; see [Note: data sheets].

    Attributes:
        name: such as ``"nvlink4"``.
        nbytes_per_second: most bytes per second of a device in one direction.
        latency_seconds: of one message between two devices, within about a factor of two.
        source: standard or data sheet of the rate.
        latency_source: of the latency.
    """

    name: str
    nbytes_per_second: float
    latency_seconds: float
    source: str
    latency_source: str


def _device(
    name: str,
    memory_gb: float,
    bf16: float | None,
    fp16: float | None,
    tf32: float | None,
    fp32: float | None,
    gb_per_second: float,
    link: str,
    source: str,
) -> Device:
    """Return a row from GB, TFLOP/s and GB/s."""

    def flops(rate: float | None) -> float | None:
        return None if rate is None else rate * 1e12

    return Device(
        name=name,
        memory_nbytes=round(memory_gb * 1e9),
        bf16=flops(bf16),
        fp16=flops(fp16),
        tf32=flops(tf32),
        fp32=flops(fp32),
        memory_nbytes_per_second=gb_per_second * 1e9,
        link=link,
        source=source,
    )


_TURING = "NVIDIA Turing architecture white paper, product page"
_GA102 = "NVIDIA Ampere GA102 architecture white paper, product page"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"

# name, GB, TFLOP/s in bf16, fp16, tf32, fp32, GB/s, link, source
_ROWS = (
    _device("gtx-1660", 6, None, 10.0, None, 5.0, 192, "pcie3", _TURING),
    _device("gtx-1660-ti", 6, None, 11.0, None, 5.5, 288, "pcie3", _TURING),
    _device("rtx-2060", 6, None, 25.8, None, 6.5, 336, "pcie3", _TURING),
    _device("rtx-3050-6gb", 6, 13.5, 13.5, 6.8, 6.8, 168, "pcie4-x8", _GA102),
    _device("rtx-3050-8gb", 8, 18.2, 18.2, 9.1, 9.1, 224, "pcie4-x8", _GA102),
    _device("rtx-3060", 12, 25.5, 25.5, 12.7, 12.7, 360, "pcie4", _GA102),
    _device("rtx-3090", 24, 71.0, 71.0, 35.6, 35.6, 936, "nvlink3-bridge", _GA102),
    _device("rtx-4090", 24, 165.2, 165.2, 82.6, 82.6, 1008, "pcie4", _ADA),
    _device("t4", 16, None, 65.0, None, 8.1, 320, "pcie3", "NVIDIA T4 data sheet"),
    _device("v100-16gb", 16, None, 125.0, None, 15.7, 900, "nvlink2", _V100),
    _device("v100-32gb", 32, None, 125.0, None, 15.7, 900, "nvlink2", _V100),
    _device("a10", 24, 125.0, 125.0, 62.5, 31.2, 600, "pcie4", "NVIDIA A10 data sheet"),
    _device("a100-40gb", 40, 312.0, 312.0, 156.0, 19.5, 1555, "nvlink3", _A100),
    _device("a100-80gb", 80, 312.0, 312.0, 156.0, 19.5, 2039, "nvlink3", _A100),
    _device("a100-80gb-pcie", 80, 312.0, 312.0, 156.0, 19.5, 1935, "pcie4", _A100),
    _device("l4", 24, 121.0, 121.0, 60.0, 30.3, 300, "pcie4", "NVIDIA L4 data sheet"),
    _device("l40s", 48, 362.0, 362.0, 183.0, 91.6, 864, "pcie4", "NVIDIA L40S data sheet"),
    _device("h100-pcie", 80, 756.0, 756.0, 378.0, 51.2, 2000, "pcie5", _H100),
    _device("h100-sxm", 80, 989.4, 989.4, 494.7, 66.9, 3350, "nvlink4", _H100),
    _device("h200", 141, 989.4, 989.4, 494.7, 66.9, 4800, "nvlink4", "NVIDIA H200 data sheet"),
    _device("b200", 180, 2250.0, 2250.0, 1125.0, 75.0, 7700, "nvlink5", "NVIDIA HGX B200 data sheet"),
    _device("tpu-v5p", 95, 459.0, None, None, None, 2765, "ici-v5p", "Google Cloud documentation, TPU v5p"),
)  # fmt: skip
DEVICES: dict[str, Device] = {row.name: row for row in _ROWS}

_TUNER = "NCCL's tuner (ncclTunerConstantsDefaults, ring, protocol Simple)"
_NET = f"{_TUNER}, class NET; a bare message over RDMA takes 1 to 2 µs"
_TCP = "TCP through two kernels and one switch: the usual 25 to 50 µs"
_PCIE, _NVLINK = "PCI Express base specification, 128b/130b", "half of NVIDIA's figure"
_ETHERNET, _INFINIBAND = "IEEE 802.3", "InfiniBand Trade Association roadmap, 4 lanes"

_LINKS = (
    Interconnect("pcie3", 15.75e9, 5.7e-6, f"{_PCIE}, 16 lanes of 8 GT/s", _TUNER),
    Interconnect("pcie4-x8", 15.75e9, 5.7e-6, f"{_PCIE}, 8 lanes of 16 GT/s", _TUNER),
    Interconnect("pcie4", 31.5e9, 5.7e-6, f"{_PCIE}, 16 lanes of 16 GT/s", _TUNER),
    Interconnect("pcie5", 63e9, 5.7e-6, f"{_PCIE}, 16 lanes of 32 GT/s", _TUNER),
    Interconnect("nvlink1", 80e9, 3.4e-6, f"{_NVLINK}: P100, 4 × 20 GB/s", _TUNER),
    Interconnect("nvlink2", 150e9, 3.4e-6, f"{_NVLINK}: V100, 6 × 25 GB/s", _TUNER),
    Interconnect("nvlink3-bridge", 56.25e9, 3.4e-6, f"{_GA102}: 4 × 14.06 GB/s", _TUNER),
    Interconnect("nvlink3", 300e9, 3.4e-6, f"{_NVLINK}: A100, 12 × 25 GB/s", _TUNER),
    Interconnect("nvlink4", 450e9, 3.4e-6, f"{_NVLINK}: H100, 18 × 25 GB/s", _TUNER),
    Interconnect("nvlink5", 900e9, 3.4e-6, f"{_NVLINK}: B200, 18 × 50 GB/s", _TUNER),
    Interconnect("ici-v5p", 180e9, 1e-6, "How to Scale Your Model (2025): 9e10 B/s each way round an axis's ring",
                 "the same, about 1 µs a hop"),
    *(Interconnect(f"ethernet-{gbit}g", gbit * 1e9 / 8, seconds, _ETHERNET, _TCP)
      for gbit, seconds in ((1, 50e-6), (10, 30e-6), (25, 25e-6), (100, 25e-6), (200, 25e-6), (400, 25e-6))),
    *(Interconnect(f"infiniband-{gbit}g", gbit * 1e9 / 8, 14e-6, f"{_INFINIBAND} ({name})", _NET)
      for gbit, name in ((100, "EDR"), (200, "HDR"), (400, "NDR"))),
)  # fmt: skip
INTERCONNECTS: dict[str, Interconnect] = {row.name: row for row in _LINKS}

_ALIASES = {
    "rtx-3050": "rtx-3050-8gb",
    "v100": "v100-16gb",
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "v5p": "tpu-v5p",
    "edr": "infiniband-100g",
    "hdr": "infiniband-200g",
    "ndr": "infiniband-400g",
} | {f"{gbit}gbe": f"ethernet-{gbit}g" for gbit in (1, 10, 25, 100, 200, 400)}


_IGNORED_WORDS = {"nvidia", "geforce", "tesla", "sxm2", "sxm4", "sxm5", "hbm3"}
"""Words of a driver's device name that distinguish no two rows of the table."""


def find_device(name: str) -> Device:
    """Return a device by name; vendor names, case and blanks are ignored.

    Raises:
        UsageError: unknown device; the nearest name is suggested.

    Example:
        >>> find_device("NVIDIA GeForce RTX 4090").memory_nbytes
        24000000000
        >>> find_device("H100").name
        'h100-sxm'
    """
    plain = _plain(name)
    if plain not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[plain]


def find_interconnect(name: str) -> Interconnect:
    """Return a kind of link by name.

    Raises:
        UsageError: unknown link; the nearest name is suggested.

    Example:
        >>> find_interconnect("1GbE").nbytes_per_second, find_interconnect("ndr").nbytes_per_second
        (125000000.0, 50000000000.0)
    """
    plain = _plain(name)
    if plain not in INTERCONNECTS:
        raise unknown("link", name, INTERCONNECTS)
    return INTERCONNECTS[plain]


def _plain(name: str) -> str:
    words = name.lower().replace("_", " ").replace("-", " ").split()
    plain = "-".join(word for word in words if word not in _IGNORED_WORDS)
    return _ALIASES.get(plain, plain)
