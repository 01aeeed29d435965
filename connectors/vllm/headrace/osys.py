"""What Python's os module has only where its build found it: memfds, eventfds, pidfds. The kernel has had them for years."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import socket
import struct

SO_PEERPIDFD = 77  # Linux 6.5
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 0x1, 0x2, 0x4
MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_HUGETLB = 0x1, 0x2, 0x4

_NUMBERS = {  # x86-64 has numbers of its own; all later architectures share the others
    "memfd_create": (319, 279),
    "eventfd2": (290, 19),
    "pidfd_open": (434, 434),
}


def _syscall(name: str, *args: object) -> int:
    number = _NUMBERS[name][0 if platform.machine() == "x86_64" else 1]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def memfd(name: str, size: int, *, huge: bool = False) -> int:
    """A memfd of size bytes that cannot shrink or grow, nor be sealed otherwise."""
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (MFD_HUGETLB if huge else 0)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, flags)
    else:
        fd = _syscall("memfd_create", ctypes.c_char_p(name.encode()), ctypes.c_uint(flags))
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def eventfd() -> int:
    """A doorbell."""
    if hasattr(os, "eventfd"):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return _syscall("eventfd2", ctypes.c_uint(0), ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK))


def peer_process(sock: socket.socket) -> int:
    """A pidfd of the process that listens at the other end. OSError says why there is none."""
    try:
        fd: int = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        return fd
    except OSError:
        pass
    pid = peer_pid(sock)
    if pid <= 0:
        raise ProcessLookupError("it is in another PID namespace, and this kernel has no SO_PEERPIDFD (Linux 6.5)")
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _syscall("pidfd_open", ctypes.c_int(pid), ctypes.c_uint(0))


def peer_pid(sock: socket.socket) -> int:
    """The process id of the other end, 0 where it is in another PID namespace."""
    pid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def readable(fd: int, timeout_ms: int = 0) -> bool:
    """Whether a descriptor is readable; a pidfd is, once its process has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))
