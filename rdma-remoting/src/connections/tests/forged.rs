//! Messages that a guest's queue pair 1 makes up.

use super::*;
use farlane_rdma_cm::{CommId, Dreq, Mad, Message, PrivateData, Qpn, TransactionId};

#[test]
fn messages_that_a_guests_queue_pair_forges_change_no_connection_of_others() {
    let (rig, client, server) = two(PortConfig::default());
    server.listen(SERVICE);
    let (_, _) = connected(&client, &server);
    let forger = Program::start(&port(&rig, 3, PortConfig::default()), 1);
    let connections = forger.context.connections.clone();
    for id in 0..1000 {
        let dreq = Mad {
            transaction: TransactionId(id),
            message: Message::Dreq(Dreq {
                local_comm_id: CommId(u32::try_from(id).unwrap()),
                remote_comm_id: CommId(u32::try_from(id).unwrap() << 20),
                remote_qpn: Qpn::of(0x22),
                private_data: PrivateData::default(),
            }),
        };
        // From its own GID, and from that of the client.
        for from in [3, 1] {
            connections.pass_on(message(from, dreq.write()));
        }
        forger.turn(Instant::now());
    }
    for program in [&client, &server] {
        assert_eq!(program.next().map(drop), Err(Errno::EAGAIN));
    }
    // So many wait, and no more.
    for _ in 0..10_000 {
        connections.pass_on(message(3, [0xff; 256]));
    }
    assert_eq!(connections.take_messages(usize::MAX).0.len(), 256);
}

/// A message to the port of the server.
fn message(from: u8, datagram: [u8; 256]) -> Transmit {
    let ports = Ports {
        local: Gid([from; 16]),
        remote: Gid([2; 16]),
    };
    Transmit {
        ports,
        datagram: Box::new(datagram),
    }
}
