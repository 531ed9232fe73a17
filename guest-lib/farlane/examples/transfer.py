# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Two processes, two buffers: the client writes a pattern to the server's buffer, reads it back
and checks every byte; once asking how the transfer stands, once with a callback. Speaks with the
examples in C and Rust of the same name.

    transfer.py serve PORT SIZE
    transfer.py HOST PORT SIZE

It needs nothing but Python and libfarlane.so.0, whose functions farlane.h describes.
"""
import ctypes
import os
import socket
import struct
import sys
import time
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p

# A transfer that takes longer than this many seconds has been lost.
PATIENCE = 60

WRITE, READ = 0, 1
PENDING = 1


class Descriptor(ctypes.Structure):
    """What a peer must know of an endpoint or a buffer."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


Callback = ctypes.CFUNCTYPE(None, c_uint64, c_int, c_void_p)


def load():
    """The library, with the types of the functions that are called here."""
    library = ctypes.CDLL("libfarlane.so.0")
    of_descriptor = POINTER(Descriptor)
    for name, result, arguments in [
        ("init", c_int, [ctypes.c_char_p, POINTER(c_void_p)]),
        ("cleanup", None, [c_void_p]),
        ("buffer_allocate", c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
        ("buffer_free", None, [c_void_p]),
        ("buffer_address", c_void_p, [c_void_p]),
        ("buffer_id", c_uint64, [c_void_p]),
        ("buffer_is_host", c_int, [c_void_p]),
        ("buffer_describe", None, [c_void_p, of_descriptor]),
        ("endpoint_create", c_int, [c_void_p, POINTER(c_void_p)]),
        ("endpoint_free", None, [c_void_p]),
        ("endpoint_describe", None, [c_void_p, of_descriptor]),
        ("endpoint_connect", c_int, [c_void_p, of_descriptor]),
        ("start", c_int, [c_void_p, c_int, c_void_p, c_size_t, of_descriptor, c_uint64, c_size_t,
                          Callback, c_void_p, POINTER(c_uint64)]),
        ("query", c_int, [c_void_p, c_uint64]),
        ("dispatch", c_int, [c_void_p, c_int]),
    ]:
        function = getattr(library, "farlane_" + name)
        function.restype, function.argtypes = result, arguments
    return library


def checked(what, result):
    """Raises what a function of the library has said when it failed."""
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


def receive(sock, length):
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionError("The peer has gone")
        data += more
    return data


def meet_peer(sock):
    """Tells the peer that this side is as far, and waits for the same word."""
    sock.sendall(b".")
    receive(sock, 1)


def pattern(seed, length):
    """The words of a linear congruential generator (Knuth's MMIX), little-endian."""
    words = []
    for _ in range(0, length, 8):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(seed)
    return struct.pack(f"<{len(words)}Q", *words)[:length]


class Party:
    """What both sides have: a buffer, an endpoint, and what the peer has told of its own."""

    def __init__(self, sock, size):
        self.sock, self.size, self.farlane = sock, size, load()
        self.library, self.buffer, self.endpoint = c_void_p(), c_void_p(), c_void_p()
        farlane = self.farlane
        checked("farlane_init", farlane.farlane_init(None, byref(self.library)))
        checked("farlane_buffer_allocate",
                farlane.farlane_buffer_allocate(self.library, size, byref(self.buffer)))
        self.address = farlane.farlane_buffer_address(self.buffer)
        placement = "Host" if farlane.farlane_buffer_is_host(self.buffer) else "Guest"
        number = farlane.farlane_buffer_id(self.buffer)
        print(f"buffer {number}: {size} bytes, placement {placement}")
        checked("farlane_endpoint_create",
                farlane.farlane_endpoint_create(self.library, byref(self.endpoint)))
        mine = Descriptor()
        farlane.farlane_endpoint_describe(self.endpoint, byref(mine))
        sock.sendall(bytes(mine))
        farlane.farlane_buffer_describe(self.buffer, byref(mine))
        sock.sendall(bytes(mine))
        peer = Descriptor.from_buffer_copy(receive(sock, ctypes.sizeof(Descriptor)))
        self.remote = Descriptor.from_buffer_copy(receive(sock, ctypes.sizeof(Descriptor)))
        checked("farlane_endpoint_connect",
                farlane.farlane_endpoint_connect(self.endpoint, byref(peer)))
        # Neither side starts before both are connected.
        meet_peer(sock)

    def clean_up(self):
        self.farlane.farlane_endpoint_free(self.endpoint)
        self.farlane.farlane_buffer_free(self.buffer)
        self.farlane.farlane_cleanup(self.library)
        self.sock.close()

    def check(self, seed):
        found = (ctypes.c_char * self.size).from_address(self.address).raw
        if found != pattern(seed, self.size):
            raise ValueError(f"The {self.size} bytes are not those of pattern {seed}")

    def start(self, direction, callback):
        """Starts a transfer of the whole buffer; returns its number."""
        transfer = c_uint64()
        checked("farlane_start",
                self.farlane.farlane_start(self.endpoint, direction, self.buffer, 0,
                                           byref(self.remote), 0, self.size, callback, None,
                                           byref(transfer)))
        return transfer.value

    def polling(self, direction):
        """One transfer, asking how it stands."""
        transfer = self.start(direction, Callback())
        start = time.monotonic()
        while checked("farlane_query",
                      self.farlane.farlane_query(self.library, transfer)) == PENDING:
            if time.monotonic() - start > PATIENCE:
                raise TimeoutError("A transfer was lost")

    def callback(self, direction):
        """One transfer; the callback runs in farlane_dispatch."""
        finished = []
        # The function must not be collected before it was called.
        function = Callback(lambda number, error, _: finished.append((number, error)))
        transfer = self.start(direction, function)
        ran = self.farlane.farlane_dispatch(self.library, PATIENCE * 1000)
        if checked("farlane_dispatch", ran) != 1:
            raise TimeoutError("A transfer was lost")
        if finished != [(transfer, 0)]:
            raise ValueError(f"The callback of transfer {transfer} was told {finished}")

    def round_trip(self, name, seed, transfer):
        """Writes pattern seed to the peer, wipes the buffer, reads it back and checks it."""
        ctypes.memmove(self.address, pattern(seed, self.size), self.size)
        start = time.monotonic()
        transfer(WRITE)
        written = time.monotonic() - start
        ctypes.memset(self.address, 0, self.size)
        start = time.monotonic()
        transfer(READ)
        read = time.monotonic() - start
        self.check(seed)
        print(f"{name}: write {self.size / written / 1e6:.0f} MB/s, "
              f"read {self.size / read / 1e6:.0f} MB/s")


def accept_one(port):
    with socket.create_server(("0.0.0.0", port)) as listener:
        print(f"listening on port {listener.getsockname()[1]}", flush=True)
        return listener.accept()[0]


def connect_to(host, port):
    """Connects, giving a server that was started at the same time a few seconds."""
    start = time.monotonic()
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            if time.monotonic() - start > 10:
                raise
            time.sleep(0.1)


def main():
    if len(sys.argv) != 4:
        sys.exit("Use: transfer.py serve PORT SIZE, or transfer.py HOST PORT SIZE")
    host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if host == "serve":
        party = Party(accept_one(port), size)
        # The client has written twice, the second pattern last.
        meet_peer(party.sock)
        party.check(2)
        meet_peer(party.sock)
    else:
        party = Party(connect_to(host, port), size)
        party.round_trip("polling", 1, party.polling)
        party.round_trip("callback", 2, party.callback)
        meet_peer(party.sock)
        meet_peer(party.sock)
    print(f"{'server' if host == 'serve' else 'client'}: {size} bytes right")
    party.clean_up()


main()
