//! Datagrams of messages.

use super::{Datagram, Drep, Dreq, Mad, Message, Mra, Path, Rej, Rep, Req, Rtu, SidrRep, SidrReq};
use crate::bits::{
    BASE_VERSION, CLASS, CLASS_VERSION, DreqBits, METHOD_SEND, MadHeader, MraBits, PathBits,
    RejBits, RepBits, ReqBits, RtuBits, SidrRepBits, SidrReqBits, attribute,
};
use zerocopy::IntoBytes;

impl Mad {
    /// Its datagram. Whatever is reserved is zero.
    #[must_use]
    pub fn write(&self) -> Datagram {
        let header = |attribute: u16| MadHeader {
            base_version: BASE_VERSION,
            class: CLASS,
            class_version: CLASS_VERSION,
            method: METHOD_SEND,
            status: 0.into(),
            class_specific: 0.into(),
            transaction: self.transaction.0.into(),
            attribute: attribute.into(),
            reserved: 0.into(),
            modifier: 0.into(),
        };
        match &self.message {
            Message::Req(req) => datagram(&req_bits(header(attribute::REQ), req)),
            Message::Mra(mra) => datagram(&mra_bits(header(attribute::MRA), mra)),
            Message::Rej(rej) => datagram(&rej_bits(header(attribute::REJ), rej)),
            Message::Rep(rep) => datagram(&rep_bits(header(attribute::REP), rep)),
            Message::Rtu(rtu) => datagram(&rtu_bits(header(attribute::RTU), rtu)),
            Message::Dreq(dreq) => datagram(&dreq_bits(header(attribute::DREQ), dreq)),
            Message::Drep(drep) => datagram(&drep_bits(header(attribute::DREP), drep)),
            Message::SidrReq(req) => datagram(&sidr_req_bits(header(attribute::SIDR_REQ), req)),
            Message::SidrRep(rep) => datagram(&sidr_rep_bits(header(attribute::SIDR_REP), rep)),
        }
    }
}

fn datagram<T: IntoBytes + zerocopy::Immutable>(bits: &T) -> Datagram {
    let mut all = [0; _];
    // Each layout has as many bytes, which is asserted beside it.
    all.copy_from_slice(bits.as_bytes());
    all
}

fn path_bits(path: &Path) -> PathBits {
    let subnet_local = if path.subnet_local { 0x08 } else { 0 };
    PathBits {
        local_lid: path.local_lid.into(),
        remote_lid: path.remote_lid.into(),
        local_gid: path.local_gid.0,
        remote_gid: path.remote_gid.0,
        flow_label_rate: (path.flow_label.get() << 12 | u32::from(path.packet_rate.get())).into(),
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        sl_subnet_local: path.service_level.get() << 4 | subnet_local,
        ack_timeout: path.ack_timeout.get() << 3,
    }
}

const NO_PATH: PathBits = PathBits {
    local_lid: zerocopy::big_endian::U16::ZERO,
    remote_lid: zerocopy::big_endian::U16::ZERO,
    local_gid: [0; 16],
    remote_gid: [0; 16],
    flow_label_rate: zerocopy::big_endian::U32::ZERO,
    traffic_class: 0,
    hop_limit: 0,
    sl_subnet_local: 0,
    ack_timeout: 0,
};

fn req_bits(header: MadHeader, req: &Req) -> ReqBits {
    let (service_type, extended) = req.transport.wire();
    let flow_control = u8::from(req.end_to_end_flow_control);
    let srq = if req.srq { 0x08 } else { 0 };
    ReqBits {
        header,
        local_comm_id: req.local_comm_id.0.into(),
        reserved4: 0.into(),
        service_id: req.service_id.0.into(),
        local_ca_guid: req.local_ca_guid.0.into(),
        reserved24: 0.into(),
        local_q_key: req.local_q_key.into(),
        local_qpn: req.local_qpn.wire(),
        responder_resources: req.responder_resources,
        local_eecn: [0; 3],
        initiator_depth: req.initiator_depth,
        remote_eecn: [0; 3],
        remote_timeout_transport: req.remote_cm_response_timeout.get() << 3
            | service_type << 1
            | flow_control,
        starting_psn: req.starting_psn.wire(),
        local_timeout_retries: req.local_cm_response_timeout.get() << 3 | req.retry_count.get(),
        partition_key: req.partition_key.into(),
        mtu_rnr_retries: req.path_mtu.number() << 4 | req.rnr_retry_count.get(),
        cm_retries_srq: req.max_cm_retries.get() << 4 | srq | extended,
        primary: path_bits(&req.primary),
        alternate: req.alternate.as_ref().map_or(NO_PATH, path_bits),
        private_data: req.private_data.0,
    }
}

fn mra_bits(header: MadHeader, mra: &Mra) -> MraBits {
    MraBits {
        header,
        local_comm_id: mra.local_comm_id.0.into(),
        remote_comm_id: mra.remote_comm_id.0.into(),
        message: mra.about.wire() << 6,
        service_timeout: mra.service_timeout.get() << 3,
        private_data: mra.private_data.0,
    }
}

fn rej_bits(header: MadHeader, rej: &Rej) -> RejBits {
    let (length, info) = rej.info.wire();
    RejBits {
        header,
        local_comm_id: rej.local_comm_id.0.into(),
        remote_comm_id: rej.remote_comm_id.0.into(),
        message: rej.about.wire() << 6,
        info_length: length << 1,
        reason: rej.reason.0.into(),
        info,
        private_data: rej.private_data.0,
    }
}

fn rep_bits(header: MadHeader, rep: &Rep) -> RepBits {
    let srq = if rep.srq { 0x10 } else { 0 };
    RepBits {
        header,
        local_comm_id: rep.local_comm_id.0.into(),
        remote_comm_id: rep.remote_comm_id.0.into(),
        local_q_key: rep.local_q_key.into(),
        local_qpn: rep.local_qpn.wire(),
        reserved15: 0,
        local_eecn: rep.local_eecn.wire(),
        reserved19: 0,
        starting_psn: rep.starting_psn.wire(),
        reserved23: 0,
        responder_resources: rep.responder_resources,
        initiator_depth: rep.initiator_depth,
        ack_delay_failover: rep.target_ack_delay.get() << 3
            | rep.failover.get() << 1
            | u8::from(rep.end_to_end_flow_control),
        rnr_retries_srq: rep.rnr_retry_count.get() << 5 | srq,
        local_ca_guid: rep.local_ca_guid.0.into(),
        private_data: rep.private_data.0,
    }
}

fn rtu_bits(header: MadHeader, rtu: &Rtu) -> RtuBits {
    RtuBits {
        header,
        local_comm_id: rtu.local_comm_id.0.into(),
        remote_comm_id: rtu.remote_comm_id.0.into(),
        private_data: rtu.private_data.0,
    }
}

fn dreq_bits(header: MadHeader, dreq: &Dreq) -> DreqBits {
    DreqBits {
        header,
        local_comm_id: dreq.local_comm_id.0.into(),
        remote_comm_id: dreq.remote_comm_id.0.into(),
        remote_qpn: dreq.remote_qpn.wire(),
        reserved11: 0,
        private_data: dreq.private_data.0,
    }
}

fn drep_bits(header: MadHeader, drep: &Drep) -> RtuBits {
    RtuBits {
        header,
        local_comm_id: drep.local_comm_id.0.into(),
        remote_comm_id: drep.remote_comm_id.0.into(),
        private_data: drep.private_data.0,
    }
}

fn sidr_req_bits(header: MadHeader, req: &SidrReq) -> SidrReqBits {
    SidrReqBits {
        header,
        request_id: req.request_id.0.into(),
        partition_key: req.partition_key.into(),
        reserved6: 0.into(),
        service_id: req.service_id.0.into(),
        private_data: req.private_data.0,
    }
}

fn sidr_rep_bits(header: MadHeader, rep: &SidrRep) -> SidrRepBits {
    let (info_length, info) = rep.info.wire();
    SidrRepBits {
        header,
        request_id: rep.request_id.0.into(),
        status: rep.status.0,
        info_length,
        reserved6: 0.into(),
        qpn: rep.qpn.wire(),
        reserved11: 0,
        service_id: rep.service_id.0.into(),
        q_key: rep.q_key.into(),
        info,
        private_data: rep.private_data.0,
    }
}
