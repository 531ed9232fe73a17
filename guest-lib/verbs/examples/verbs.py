# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Two processes, two regions of memory: the client writes a pattern to the server's memory by RDMA
WRITE, reads it back by RDMA READ and checks every byte.

    farlane-run python3 verbs.py serve PORT SIZE
    farlane-run python3 verbs.py HOST PORT SIZE

It uses pyverbs as rdma-core has it (Debian's python3-pyverbs), and nothing of Farlane: without
farlane-run it uses the RDMA devices of the kernel. The TCP connection carries what one end must
know of the other, and a word when they wait for each other. Exit status 0 means that all bytes
were right.
"""
import json
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

# A request that takes longer than this many seconds has been lost.
PATIENCE = 60

PORT = 1
GID_INDEX = 0
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class End:
    """Memory, and a queue pair of a reliable connection."""

    def __init__(self, size):
        devices = get_device_list()
        if not devices:
            sys.exit("There is no RDMA device: is this run by farlane-run?")
        self.size = size
        self.context = Context(name=devices[0].name.decode())
        self.domain = PD(self.context)
        self.memory = MR(self.domain, size, ACCESS)
        self.completions = CQ(self.context, 4)
        capabilities = QPCap(max_send_wr=2, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.completions, rcq=self.completions,
                          cap=capabilities, sq_sig_all=1)
        self.queue_pair = QP(self.domain, made)

    def described(self):
        """What the peer must know."""
        gid = self.context.query_gid(port_num=PORT, index=GID_INDEX)
        return {"number": self.queue_pair.qp_num, "gid": gid.gid,
                "address": self.memory.buf, "key": self.memory.rkey}

    def connect(self, peer):
        """Connects the queue pair to the peer's, which does the same."""
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=GID_INDEX)
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        attributes.dest_qp_num = peer["number"]
        attributes.path_mtu = e.IBV_MTU_4096
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 7, 7
        self.queue_pair.to_rts(attributes)

    def request(self, operation, peer):
        """Posts a request about all of the memory, and waits for its completion."""
        local = SGE(self.memory.buf, self.size, self.memory.lkey)
        request = SendWR(num_sge=1, sg=[local], opcode=operation)
        request.set_wr_rdma(peer["key"], peer["address"])
        self.queue_pair.post_send(request)
        deadline = time.monotonic() + PATIENCE
        count = 0
        while count == 0:
            if time.monotonic() > deadline:
                sys.exit("A request was lost")
            count, completions = self.completions.poll()
        if completions[0].status != e.IBV_WC_SUCCESS:
            sys.exit(f"A request has ended with status {completions[0].status}")

    def write(self, data):
        self.memory.write(data, self.size)

    def check(self, data):
        if self.memory.read(self.size, 0) != data:
            sys.exit("Bytes are wrong")


class Peer:
    """The other process, at the other end of the TCP connection. It has a file for each direction:
    a text file for both drops what it has read ahead when it is written to."""

    def __init__(self, connection):
        self.told = connection.makefile("w")
        self.heard = connection.makefile("r")

    def tell(self, word):
        self.told.write(json.dumps(word) + "\n")
        self.told.flush()

    def hear(self):
        line = self.heard.readline()
        if not line:
            sys.exit("The peer has gone")
        return json.loads(line)

    def meet(self, end):
        """Tells the peer of an end, and connects it to the peer's; returns what that has said."""
        self.tell(end.described())
        theirs = self.hear()
        end.connect(theirs)
        self.tell("connected")
        self.hear()
        return theirs


def pattern(size):
    return bytes(index * 7 % 251 for index in range(size))


def serve(port, size):
    with socket.create_server(("", port)) as listener:
        connection, _ = listener.accept()
    with connection:
        peer = Peer(connection)
        end = End(size)
        peer.meet(end)
        peer.hear()
        end.check(pattern(size))
        peer.tell("right")
    print(f"server: {size} bytes right")


def ask(host, port, size):
    with socket.create_connection((host, port)) as connection:
        peer = Peer(connection)
        end = End(size)
        theirs = peer.meet(end)
        end.write(pattern(size))
        end.request(e.IBV_WR_RDMA_WRITE, theirs)
        end.write(bytes(size))
        end.request(e.IBV_WR_RDMA_READ, theirs)
        end.check(pattern(size))
        peer.tell("written")
        peer.hear()
    print(f"client: {size} bytes right")


if len(sys.argv) != 4:
    sys.exit("Use: verbs.py serve PORT SIZE, or verbs.py HOST PORT SIZE")
elif sys.argv[1] == "serve":
    serve(int(sys.argv[2]), int(sys.argv[3]))
else:
    ask(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
