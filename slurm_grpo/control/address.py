"""The address under which this host's other processes of a run reach it.

Asked on the host itself, by the supervisor and by every task, since names of nodes need not
resolve and may resolve to loopback. IPv4 interfaces; knows no torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from slurm_grpo.errors import ConfigError

_SIOCGIFADDR = 0x8915


def host_address() -> str:
    """This host's address towards the run's other hosts: SLURM_GRPO_HOST_ADDRESS if it is set, else
    that of the default route, and loopback when there is none.

    The numeric address, since a host name may resolve to loopback.
    """
    if told := os.environ.get("SLURM_GRPO_HOST_ADDRESS"):
        return told
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((probe, 9))  # sends nothing: it only asks for the route
            except OSError:
                continue
            return str(sock.getsockname()[0])
    return "127.0.0.1"


def address_of(interface: str) -> str:
    """IPv4 address of a network interface (`ib0`). Raises ConfigError naming those there are."""
    address = _address(interface)
    if address is None:
        there = ", ".join(f"{name} ({_address(name)})" for _, name in socket.if_nameindex())
        raise ConfigError(
            f"site.interface: {interface} has no IPv4 address on {socket.gethostname()}; expected "
            f"one of {there}. Name one that every node has, or leave it out for the default route."
        )
    return address


def interface_of(address: str) -> str | None:
    """Name of the interface that has this IPv4 address; None when there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address(name) == address), None)


def _address(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
