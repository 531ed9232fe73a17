//! Datagrams: to one queue pair, or to those that are in a group.

use super::{Completed, Model};
use crate::rig::lid;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::address::{AddressVector, Datagram, Destination, Recipients};
use farlane_rdma_remoting::request::{Opcode, SendWqe};

/// Bytes of a datagram on the wire around its data.
const AROUND_DATA: usize = 32;

/// The global route header of a datagram of so many bytes: that of IPv6.
fn route_header(from: u8, to: [u8; 16], how: &AddressVector, length: usize) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0];
    let length = u16::try_from(length + AROUND_DATA).unwrap();
    header.extend(length.to_be_bytes());
    header.extend([17, how.hop_limit]);
    header.extend([from; 16]);
    header.extend(to);
    header
}

impl Model {
    /// Sends one: whoever does not take it does without.
    pub fn send_datagram(&mut self, who: usize, request: &SendWqe, data: &[u8]) {
        let farlane_rdma_remoting::request::Target::Datagram(datagram) = request.target else {
            panic!("a datagram without an address");
        };
        let qkey = match datagram.qkey >> 31 {
            0 => datagram.qkey,
            _ => self.qps[who].qkey,
        };
        for to in self.receivers(&datagram) {
            if self.qps[to].qkey == qkey && self.qps[to].answers() {
                self.deliver(who, to, request, &datagram.address, data);
            }
        }
    }

    fn receivers(&self, datagram: &Datagram) -> Vec<usize> {
        let number = datagram.number;
        let all = 0..self.qps.len();
        match datagram.address.to {
            Recipients::Group(_) if number.get() != MULTICAST_QPN => Vec::new(),
            Recipients::Group(group) => {
                let members = self.groups.iter().filter(|(other, _)| *other == group);
                members.map(|(_, member)| *member).collect()
            }
            Recipients::Port(to) => all
                .filter(|at| {
                    let qp = &self.qps[*at];
                    let is_port = match to {
                        Destination::Gid(gid) => gid == [qp.gid(); 16],
                        Destination::Lid(number) => number == lid(qp.gid()),
                    };
                    is_port && qp.number == number
                })
                .collect(),
        }
    }

    fn deliver(
        &mut self,
        who: usize,
        to: usize,
        request: &SendWqe,
        how: &AddressVector,
        data: &[u8],
    ) {
        let header = match how.to {
            Recipients::Port(Destination::Lid(_)) => None,
            Recipients::Port(Destination::Gid(gid)) => Some(gid),
            Recipients::Group(group) => Some(*group.raw()),
        };
        let room = usize::try_from(GRH_BYTES).unwrap() + data.len();
        if self.ready(to).is_err() {
            return;
        }
        // A datagram that is not taken leaves no trace.
        let Ok(places) = self.open_receive(to, room) else {
            return;
        };
        let (before, behind) = places.split_at(room - data.len());
        let header = header.map(|gid| route_header(self.qps[who].gid(), gid, how, data.len()));
        let memory = &mut self.sides[self.qps[to].side].bytes;
        for (at, byte) in before.iter().zip(header.iter().flatten()) {
            memory[*at] = *byte;
        }
        for (at, byte) in behind.iter().zip(data) {
            memory[*at] = *byte;
        }
        let (mut flags, mut word) = (0, 0);
        // The type of the header is where a service level is else; the ports have no IPv4.
        let mut level = how.sl;
        if header.is_some() {
            flags |= WC_FLAG_GRH;
            level = 0b1001;
        }
        if request.opcode == Opcode::SendImm {
            (flags, word) = (flags | WC_FLAG_IMM, request.immediate);
        }
        let done = Completed {
            length: u32::try_from(room).unwrap(),
            word: (flags, word),
            from: self.qps[who].number.get(),
            route: u32::from(lid(self.qps[who].gid())) | u32::from(level) << 16,
        };
        self.end_receive(to, WC_STATUS_SUCCESS, done);
    }
}
