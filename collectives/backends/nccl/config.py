"""How an NCCL communicator is made: what may be set of `ncclConfig_t`, in the versions in which NCCL grew it.

Newer libraries take an older configuration by its size and version, so that it is made as old as what is set allows:
then no library refuses it that knows what is asked of it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint
from dataclasses import dataclass, fields

from collectives.errors import ArgumentError, BackendError

Version = tuple[int, ...]
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF
_FIRST = (2, 14)


class Config(ctypes.Structure):
    """`ncclConfig_t` as far as we know it."""

    _fields_ = [  # ctypes reads it so
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
    ]


#: Of each field but the first: the version that brought it. Source: nccl.h of 2.14 to 2.32.
SINCE: dict[str, Version] = {
    "blocking": _FIRST,
    **dict.fromkeys(("cgaClusterSize", "minCTAs", "maxCTAs", "netName"), (2, 17)),
    "splitShare": (2, 18),
    "trafficClass": (2, 26),
    **dict.fromkeys(("commName", "collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs"), (2, 27)),
}
_NAMES = {
    "cga_cluster_size": "cgaClusterSize",
    "min_ctas": "minCTAs",
    "max_ctas": "maxCTAs",
    "net_name": "netName",
    "traffic_class": "trafficClass",
    "collnet_enable": "collnetEnable",
    "cta_policy": "CTAPolicy",
    "nvls_ctas": "nvlsCTAs",
}


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
        least = {"min_ctas": 1, "max_ctas": 1, "nvls_ctas": 1}
        most = {"cga_cluster_size": 8, "collnet_enable": 1, "cta_policy": 2}
        for name, value in self._set().items():
            if name == "net_name":
                right = isinstance(value, str) and bool(value) and "\0" not in value
            else:
                numbers = least.get(name, 0), most.get(name, 2**31 - 1)
                right = type(value) is int and numbers[0] <= value <= numbers[1]
            if not right:
                raise ArgumentError(f"NcclConfig: {name}={value!r} is nothing that NCCL takes")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ArgumentError(f"NcclConfig: min_ctas={self.min_ctas} is above max_ctas={self.max_ctas}")

    def _set(self) -> dict[str, int | str]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        """What is set, in the same words on every rank."""
        return ", ".join(f"{name}={value!r}" for name, value in self._set().items())


def configuration(wanted: NcclConfig | None, library: Version) -> Config:
    """The structure of a communicator whose calls never block.

    library: its version. Raises: BackendError if it is too old for what is wanted.
    """
    made = Config(magic=_MAGIC, blocking=0)
    for field in SINCE:
        if field != "blocking" and not field.endswith("Name"):  # names are undefined as null pointers
            setattr(made, field, _UNDEFINED)
    needed: Version = _FIRST
    for name, value in ({} if wanted is None else wanted._set()).items():
        field = _NAMES[name]
        if library[:2] < SINCE[field]:
            asked, here = (".".join(map(str, each)) for each in (SINCE[field], library))
            raise BackendError(f"NcclConfig: {name} needs NCCL {asked} or newer, and this is {here}")
        setattr(made, field, value.encode() if isinstance(value, str) else value)
        needed = max(needed, SINCE[field])
    known = [name for name, since in SINCE.items() if since <= needed]
    last = getattr(Config, known[-1])
    made.size = -(-(last.offset + last.size) // 8) * 8
    made.version = needed[0] * 10000 + needed[1] * 100
    return made
