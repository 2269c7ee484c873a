"""How an NCCL communicator is made: what may be set of `ncclConfig_t`, in the versions in which NCCL grew it.

Newer libraries take an older configuration by its size and version, so that it is made as old as what is set allows:
then no library refuses it that knows what is asked of it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint
from dataclasses import dataclass, fields
from typing import Any

from collectives.errors import ArgumentError, BackendError

Version = tuple[int, ...]
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF
_FIRST = (2, 18)  # the oldest version that is used
_MOST = 2**31 - 1

# Source: nccl.h of 2.18 to 2.32. Each field after the first three: its type, the version that brought it, and the name
# under which it may be set, with the least and most that NCCL takes; None for text.
_FIELDS: dict[str, tuple[Any, Version, str, int | None, int]] = {
    "blocking": (c_int, _FIRST, "", 0, 0),
    "cgaClusterSize": (c_int, _FIRST, "cga_cluster_size", 0, 8),
    "minCTAs": (c_int, _FIRST, "min_ctas", 1, _MOST),
    "maxCTAs": (c_int, _FIRST, "max_ctas", 1, _MOST),
    "netName": (c_char_p, _FIRST, "net_name", None, 0),
    "splitShare": (c_int, _FIRST, "", 0, 0),
    "trafficClass": (c_int, (2, 26), "traffic_class", 0, _MOST),
    "commName": (c_char_p, (2, 27), "", 0, 0),
    "collnetEnable": (c_int, (2, 27), "collnet_enable", 0, 1),
    "CTAPolicy": (c_int, (2, 27), "cta_policy", 0, 2),
    "shrinkShare": (c_int, (2, 27), "", 0, 0),
    "nvlsCTAs": (c_int, (2, 27), "nvls_ctas", 1, _MOST),
}
_OPTIONS = {option: (field, since, least, most) for field, (_, since, option, least, most) in _FIELDS.items() if option}


class Config(ctypes.Structure):
    """`ncclConfig_t` as far as we know it."""

    _fields_ = [  # ctypes reads it so
        *(("size", c_size_t), ("magic", c_uint), ("version", c_uint)),
        *((name, kind) for name, (kind, *_) in _FIELDS.items()),
    ]


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """What NCCL's communicators are made with; None leaves it to NCCL and its environment. The same on every rank.

    min_ctas, max_ctas: thread blocks, which NCCL also calls channels, that a collective takes of the GPU at least and
    at most: fewer leave more of it to what is computed at the same time. cga_cluster_size: thread blocks of a cluster,
    0 to 8, on Hopper and newer. net_name: of the network plugin, "IB" or "Socket" say. traffic_class: of the network's
    packets. collnet_enable: 1 for reductions inside the network. cta_policy: 0 for speed, 1 for few thread blocks, 2
    for none where the hardware can. nvls_ctas: thread blocks of reductions inside NVLink's switches.

    Raises: ArgumentError for a number that NCCL would refuse; where a communicator is made, BackendError for what the
    library is too old for.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None
    traffic_class: int | None = None
    collnet_enable: int | None = None
    cta_policy: int | None = None
    nvls_ctas: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            _, _, least, most = _OPTIONS[name]
            if least is None:
                right = isinstance(value, str) and bool(value) and "\0" not in value
            else:
                right = type(value) is int and least <= value <= most
            if not right:
                raise ArgumentError(f"NcclConfig: {name}={value!r} is nothing that NCCL takes")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ArgumentError(f"NcclConfig: min_ctas={self.min_ctas} is above max_ctas={self.max_ctas}")

    def options(self) -> dict[str, int | str]:
        """What is set, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        """What is set, in the same words on every rank."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def configuration(wanted: NcclConfig | None, library: Version) -> Config:
    """The structure of a communicator whose calls never block.

    library: its version. Raises: BackendError if it is too old for what is wanted.
    """
    made = Config(magic=_MAGIC)
    for field, (kind, *_) in _FIELDS.items():
        if kind is c_int:  # texts are undefined as null pointers
            setattr(made, field, 0 if field == "blocking" else _UNDEFINED)
    needed: Version = _FIRST
    for name, value in ({} if wanted is None else wanted.options()).items():
        field, since, _, _ = _OPTIONS[name]
        if library[:2] < since:
            asked, here = (".".join(map(str, each)) for each in (since, library))
            raise BackendError(f"NcclConfig: {name} needs NCCL {asked} or newer, and this is {here}")
        setattr(made, field, value.encode() if isinstance(value, str) else value)
        needed = max(needed, since)
    last = getattr(Config, [name for name, (_, since, *_) in _FIELDS.items() if since <= needed][-1])
    made.size = -(-(last.offset + last.size) // 8) * 8
    made.version = needed[0] * 10000 + needed[1] * 100
    return made
