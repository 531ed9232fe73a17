//! Datagrams to whoever there is, by handles that are forged, and floods of them.

use crate::Failure;
use crate::pair::{ALL, Qp, address, filled, holds, own_gid, sge};
use crate::session::{Queue, Session};
use crate::table::Table;
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_ATOMIC_WRITE, OP_SEND, OP_SEND_IMM, SEND_SIGNALED, SEND_TAIL, SendEntry, SendTail, Sge,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{
    self, CreateAh, MULTICAST_QPN, McastGroup, ModifyQp, QpAttr, VerbsStubs, VersionRange,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_attacks::Random;
use farlane_transport::DeviceInfo;

const GROUP: &str = "datagrams";
const QKEY: u32 = 7;
/// Of the highest bit: the sender's own key.
const OWN_QKEY: u32 = 1 << 31;

/// What sends, and what it names.
struct Sender<'a> {
    session: &'a Session,
    qp: Qp,
    cq: Queue,
    element: Sge,
}

impl Sender<'_> {
    fn post(&self, opcode: u8, tail: Option<SendTail>, element: &Sge) {
        let head = SendEntry {
            opcode,
            flags: SEND_SIGNALED | tail.map_or(0, |_| SEND_TAIL),
            num_sge: 1.into(),
            ..SendEntry::default()
        };
        let mut bytes = head.as_bytes().to_vec();
        if let Some(tail) = tail {
            bytes.extend(tail.as_bytes());
        }
        bytes.extend(element.as_bytes());
        self.qp.push_bytes(&bytes);
        self.qp.publish(self.session);
    }

    /// Sends one; returns its status.
    fn send(&self, handle: u32, number: u32, qkey: u32) -> Result<u8, Errno> {
        let tail = SendTail::datagram(handle, number, qkey);
        self.post(OP_SEND, Some(tail), &self.element);
        self.cq.next_status(self.session)
    }

    /// After an error of its own: ready to send again.
    fn recover(&self) -> Result<(), Failure> {
        let attr = QpAttr {
            qp_state: rdma::QPS_RTS,
            ..QpAttr::default()
        };
        VerbsStubs(self.session).modify_qp(&ModifyQp {
            qp: self.qp.handle.into(),
            mask: rdma::QP_STATE.into(),
            attr,
        })?;
        Ok(())
    }
}

/// Attacks what the backend does with datagrams.
pub fn attack(device: &DeviceInfo, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open(device)?;
    let verbs = VerbsStubs(&session);
    verbs.negotiate(&VersionRange::ours())?;
    let pd = verbs.alloc_pd(&())?.get();
    let memory = filled(0x44)?;
    let pin = session.pin(&memory, true)?;
    let mr = session.register(pd, pin, &memory, ALL)?;
    let element = sge(address(&memory), 64, mr.lkey.get());
    let (cq, receiver_cq) = (Queue::create(&session, 256)?, Queue::create(&session, 256)?);
    let sender = Sender {
        session: &session,
        qp: Qp::datagrams(&session, pd, cq.handle, QKEY)?,
        cq,
        element,
    };
    let receiver = Qp::datagrams(&session, pd, receiver_cq.handle, QKEY)?;
    let to = |pd: u32, dgid| CreateAh {
        pd: pd.into(),
        dgid,
        is_global: 1,
        port_num: 1,
        ..CreateAh::default()
    };
    let own = verbs.create_ah(&to(pd, own_gid(&session)?))?.get();

    let elsewhere = verbs.alloc_pd(&())?.get();
    let of_another = verbs.create_ah(&to(elsewhere, own_gid(&session)?))?.get();
    let stale = verbs.create_ah(&to(pd, own_gid(&session)?))?.get();
    verbs.destroy_ah(&stale.into())?;
    for (what, handle) in [
        ("handle 0", 0),
        ("a handle of all ones", u32::MAX),
        ("a handle that is stale", stale),
        ("a handle of another protection domain", of_another),
        (
            "a queue pair's handle as an address's",
            receiver.handle | 1 << 30,
        ),
        ("a handle of the witness's domain", witness.pd | 1 << 29),
    ] {
        let status = sender.send(handle, receiver.number, QKEY)?;
        let good = status == WC_STATUS_LOC_QP_OP_ERR;
        table.note(GROUP, what, &format!("status {status}"), good);
        sender.recover()?;
    }
    for opcode in 0..=OP_ATOMIC_WRITE + 2 {
        for tail in [None, Some(SendTail::datagram(own, receiver.number, QKEY))] {
            // That with its operands is a decent one.
            if matches!((opcode, tail), (OP_SEND | OP_SEND_IMM, Some(_))) {
                continue;
            }
            sender.post(opcode, tail, &element);
            let status = sender.cq.next_status(&session)?;
            let good = status == WC_STATUS_LOC_QP_OP_ERR;
            let what = format!("opcode {opcode}, operands: {}", tail.is_some());
            table.note(GROUP, &what, &format!("status {status}"), good);
            sender.recover()?;
        }
    }

    // Strangers, and the witness, whose queue pair is connected to another one.
    let theirs = verbs.create_ah(&to(pd, witness.gid))?.get();
    let mut random = Random::new(6);
    let mut all = true;
    for round in 0..500 {
        let number = match round % 3 {
            0 => witness.qp_number,
            1 => MULTICAST_QPN,
            _ => random.below32(1 << 24),
        };
        let qkey = random.below32(u32::MAX);
        all &= sender.send(theirs, number, qkey)? == WC_STATUS_SUCCESS;
    }
    table.many(GROUP, "datagrams to strangers", 500, "nobody says", all);

    flood(&sender, &receiver, own, table)?;
    groups(&sender, &receiver, &to(pd, [0xff; 16]), table)?;
    let untouched = holds(&memory, 0x44);
    table.note(GROUP, "memory afterwards", "as it was", untouched);

    // And it still receives.
    receiver.push_receive(&session, &sge(address(&memory), 200, mr.lkey.get()));
    let sent = sender.send(own, receiver.number, OWN_QKEY)?;
    let received = receiver_cq.next_status(&session)?;
    let said = format!("status {sent} and {received}");
    let good = (sent, received) == (WC_STATUS_SUCCESS, WC_STATUS_SUCCESS);
    table.note(GROUP, "a decent datagram afterwards", &said, good);
    Ok(())
}

/// More than a receiver takes, each with the right key.
fn flood(sender: &Sender<'_>, receiver: &Qp, own: u32, table: &mut Table) -> Result<(), Failure> {
    const COUNT: u64 = 2000;
    let mut all = true;
    for _ in 0..COUNT {
        all &= sender.send(own, receiver.number, QKEY)? == WC_STATUS_SUCCESS;
    }
    let attr = VerbsStubs(sender.session).query_qp(&receiver.handle.into())?;
    let said = format!("its receiver is in state {}", attr.qp_state);
    let good = all && attr.qp_state == rdma::QPS_RTS;
    table.many(GROUP, "a flood", COUNT, &said, good);
    Ok(())
}

/// Groups without end, and of addresses that are none of a group.
fn groups(
    sender: &Sender<'_>,
    receiver: &Qp,
    to: &CreateAh,
    table: &mut Table,
) -> Result<(), Failure> {
    let verbs = VerbsStubs(sender.session);
    let group = |gid| McastGroup {
        qp: receiver.handle.into(),
        gid,
        ..McastGroup::default()
    };
    for gid in [[0; 16], [0xfe; 16]] {
        let outcome = verbs.attach_mcast(&group(gid));
        table.refused(GROUP, "a group that is a port", outcome, &[Errno::EINVAL]);
        let outcome = verbs.detach_mcast(&group(gid));
        table.refused(GROUP, "leaving a port", outcome, &[Errno::EINVAL]);
    }
    let numbered = |number: u32| {
        let mut gid = [0xff; 16];
        gid[12..].copy_from_slice(&number.to_be_bytes());
        gid
    };
    let mut attached = 0;
    let outcome = loop {
        match verbs.attach_mcast(&group(numbered(attached))) {
            Ok(()) if attached < 1_000_000 => attached += 1,
            other => break other,
        }
    };
    let what = format!("groups: the one after {attached}");
    table.refused(GROUP, &what, outcome, &[Errno::ENOMEM]);
    let outcome = verbs.destroy_qp(&receiver.handle.into());
    let what = "destroying a queue pair in groups";
    table.refused(GROUP, what, outcome, &[Errno::EBUSY]);
    let ah = verbs.create_ah(&CreateAh {
        dgid: numbered(0),
        ..*to
    })?;
    let status = sender.send(ah.get(), MULTICAST_QPN, QKEY)?;
    let said = format!("status {status}");
    let good = status == WC_STATUS_SUCCESS;
    table.note(GROUP, "a group whose member does not receive", &said, good);
    for number in 0..attached {
        verbs.detach_mcast(&group(numbered(number)))?;
    }
    let outcome = verbs.detach_mcast(&group(numbered(0)));
    table.refused(GROUP, "leaving a group twice", outcome, &[Errno::EINVAL]);
    Ok(())
}
