"""The address that a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

from indictune.errors import UserError


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Raises:
        UserError: the address is taken, or is none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError("host-unknown", "--host", host, reason=error.strerror) from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # soon after the last server
        made.bind(address)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError("host-unknown", "--host", host, reason=error.strerror) from error
        raise UserError("port-not-free", "--port", port, reason=error.strerror) from error
    return made


def warn_of_others(listener: socket.socket) -> None:
    """Say so if other machines reach the address."""
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        print("Anybody who reaches this address can use the model.", file=sys.stderr)
