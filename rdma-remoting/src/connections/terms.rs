//! Connection management's terms, and those of the verbs.

use super::port::PortConnections;
use farlane_abi::Errno;
use farlane_abi::rdma::{
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, CM_CONNECT_REQUEST,
    CM_CONNECT_RESPONSE, CM_DISCONNECTED, CM_ESTABLISHED, CM_IP_SERVICES, CM_REJECTED,
    CM_TIMEWAIT_EXIT, CM_UNREACHABLE, CmConnect, CmEvent, CmQpAttr, QP_ACCESS_FLAGS, QP_AV,
    QP_DEST_QPN, QP_MAX_DEST_RD_ATOMIC, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_PATH_MTU,
    QP_PKEY_INDEX, QP_PORT, QP_RETRY_CNT, QP_RNR_RETRY, QP_RQ_PSN, QP_SQ_PSN, QP_STATE, QP_TIMEOUT,
    QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, QpAttr,
};
use farlane_rdma_cm::{
    Addresses, CallError, CommId, ConnectRequest, Event, FlowLabel, Gid, IpHeader, IpService,
    ListenerId, Manager, PacketRate, PathMtu, Ports, PrivateData, Route, ServiceId, ServiceLevel,
    ServiceRequest, SidrStatus, TimeExponent, Transport,
};
use std::net::{IpAddr, Ipv6Addr};

/// The only partition.
const PARTITION_KEY: u16 = 0xffff;
/// Hop limit of connections.
const HOP_LIMIT: u8 = 64;
/// Static rate of 100 Gbit/s (IBTA table 224).
const PACKET_RATE: PacketRate = PacketRate::of(16);

/// The error number of a call that is refused.
pub fn refused(error: CallError) -> Errno {
    match error {
        CallError::NoSuchId => Errno::EBADF,
        CallError::WrongState => Errno::EINVAL,
        CallError::Limit(_) => Errno::ENOMEM,
        CallError::InUse => Errno::EADDRINUSE,
    }
}

/// Data of a program, as messages have it.
pub fn data<const BYTES: usize>(bytes: &[u8], count: u32) -> Result<PrivateData<BYTES>, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    let bytes = bytes.get(..count).ok_or(Errno::EINVAL)?;
    PrivateData::new(bytes).ok_or(Errno::EINVAL)
}

/// Transport service of a connection of such queue pairs.
pub fn transport(qp_type: u8) -> Result<Transport, Errno> {
    match u32::from(qp_type) {
        QPT_RC => Ok(Transport::Reliable),
        QPT_UC => Ok(Transport::Unreliable),
        QPT_XRC_SEND => Ok(Transport::ExtendedReliable),
        _ => Err(Errno::EINVAL),
    }
}

/// Whether queue pairs of datagrams are meant.
pub fn is_datagram(qp_type: u8) -> bool {
    u32::from(qp_type) == QPT_UD
}

/// Whether a service is a port of an IP protocol.
pub fn is_ip(service: u64) -> bool {
    service & !0x00ff_ffff == CM_IP_SERVICES
}

fn ip(gid: Gid) -> IpAddr {
    Ipv6Addr::from(gid.0).to_canonical()
}

/// Private data of a request, with the header of the RDMA IP CM service where it is one of it.
pub fn request_data<const BYTES: usize>(args: &CmConnect) -> Result<PrivateData<BYTES>, Errno> {
    let count = usize::from(args.data_bytes.get());
    let bytes = args.data.0.get(..count).ok_or(Errno::EINVAL)?;
    if !is_ip(args.service.get()) {
        return PrivateData::new(bytes).ok_or(Errno::EINVAL);
    }
    let (source, destination) = (ip(Gid(args.local_gid)), ip(Gid(args.remote_gid)));
    let addresses = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => Addresses::V4 {
            source,
            destination,
        },
        (IpAddr::V6(source), IpAddr::V6(destination)) => Addresses::V6 {
            source,
            destination,
        },
        // There is no header of these.
        _ => return Err(Errno::EINVAL),
    };
    let header = IpHeader {
        source_port: args.source_port.get(),
        addresses,
    };
    header.private_data(bytes).ok_or(Errno::EINVAL)
}

/// How packets of a connection go that is asked for.
pub fn route(args: &CmConnect) -> Result<Route, Errno> {
    Ok(Route {
        flow_label: FlowLabel::default(),
        traffic_class: args.traffic_class,
        hop_limit: HOP_LIMIT,
        service_level: ServiceLevel::default(),
        packet_rate: PACKET_RATE,
        path_mtu: PathMtu::Bytes4096,
        partition_key: PARTITION_KEY,
        ack_timeout: TimeExponent::new(args.ack_timeout).ok_or(Errno::EINVAL)?,
    })
}

/// The ports of a connection that is asked for.
pub fn ports(args: &CmConnect) -> Ports {
    Ports {
        local: Gid(args.local_gid),
        remote: Gid(args.remote_gid),
    }
}

/// Who listens for what an event asks for, and whether that is a queue pair of datagrams.
pub fn listener(event: &Event) -> Option<(ListenerId, bool)> {
    match event {
        Event::ConnectRequest { listener, .. } => Some((*listener, false)),
        Event::ServiceRequest { listener, .. } => Some((*listener, true)),
        _ => None,
    }
}

/// What a program is told of an event, but the ids.
pub fn event(event: &Event) -> CmEvent {
    match event {
        Event::ConnectRequest { request, .. } => connect_request(request),
        Event::ServiceRequest { request, .. } => service_request(request),
        Event::Reply { reply, .. } => CmEvent {
            kind: CM_CONNECT_RESPONSE.into(),
            qp_num: reply.remote_qpn.get().into(),
            responder_resources: reply.responder_resources,
            initiator_depth: reply.initiator_depth,
            rnr_retry_count: reply.rnr_retry_count.get(),
            srq: reply.srq.into(),
            ..with_data(&reply.private_data.0)
        },
        // What a peer says with it nobody is told of, as with Linux's `rdma_cm`.
        Event::Established { .. } => plain(CM_ESTABLISHED),
        Event::Rejected {
            reason,
            private_data,
            ..
        } => CmEvent {
            kind: CM_REJECTED.into(),
            status: u32::from(reason.0).into(),
            ..with_data(&private_data.0)
        },
        Event::Unreachable { .. } => plain(CM_UNREACHABLE),
        Event::Disconnected { .. } => plain(CM_DISCONNECTED),
        Event::TimewaitExit { .. } => plain(CM_TIMEWAIT_EXIT),
        Event::ServiceReply { reply, .. } => {
            let is_there = reply.status == SidrStatus::SUCCESS;
            CmEvent {
                kind: if is_there {
                    CM_ESTABLISHED
                } else {
                    CM_UNREACHABLE
                }
                .into(),
                status: u32::from(reply.status.0).into(),
                qp_num: reply.qpn.get().into(),
                qkey: reply.q_key.into(),
                ..with_data(&reply.private_data.0)
            }
        }
    }
}

fn plain(kind: u32) -> CmEvent {
    CmEvent {
        kind: kind.into(),
        ..CmEvent::default()
    }
}

fn with_data(bytes: &[u8]) -> CmEvent {
    let mut event = plain(0);
    for (to, from) in event.data.0.iter_mut().zip(bytes) {
        *to = *from;
    }
    // What is longer than the longest message is none.
    event.data_bytes = u16::try_from(bytes.len()).unwrap_or(u16::MAX).into();
    event
}

fn connect_request(request: &ConnectRequest) -> CmEvent {
    let qp_type = match request.transport {
        Transport::Reliable => QPT_RC,
        Transport::Unreliable => QPT_UC,
        Transport::ExtendedReliable => QPT_XRC_RECV,
    };
    CmEvent {
        qp_num: request.remote_qpn.get().into(),
        qp_type: small(qp_type),
        responder_resources: request.responder_resources,
        initiator_depth: request.initiator_depth,
        retry_count: request.retry_count.get(),
        rnr_retry_count: request.rnr_retry_count.get(),
        srq: request.srq.into(),
        ..asked(
            request.ports,
            request.service_id,
            request.ip,
            request.program_data(),
        )
    }
}

fn service_request(request: &ServiceRequest) -> CmEvent {
    CmEvent {
        qp_type: small(QPT_UD),
        ..asked(
            request.ports,
            request.service_id,
            request.ip,
            request.program_data(),
        )
    }
}

fn asked(ports: Ports, service: ServiceId, ip: Option<IpHeader>, data: &[u8]) -> CmEvent {
    CmEvent {
        kind: CM_CONNECT_REQUEST.into(),
        local_gid: ports.local.0,
        remote_gid: ports.remote.0,
        service: service.0.into(),
        source_port: ip.map_or(0, |ip| ip.source_port).into(),
        ..with_data(data)
    }
}

/// A number that is one of few.
fn small(number: u32) -> u8 {
    u8::try_from(number).unwrap_or_default()
}

/// Attributes of a connection's queue pair for this state.
pub fn qp_attributes(
    port: &PortConnections,
    manager: &Manager,
    comm: CommId,
    state: u32,
) -> Result<CmQpAttr, Errno> {
    let state = u8::try_from(state).map_err(|_| Errno::EINVAL)?;
    let (mask, attr) = match state {
        QPS_INIT => init(manager, comm)?,
        QPS_RTR => ready_to_receive(port, manager, comm)?,
        QPS_RTS => ready_to_send(manager, comm)?,
        _ => return Err(Errno::EINVAL),
    };
    Ok(CmQpAttr {
        mask: (mask | QP_STATE).into(),
        attr: QpAttr {
            qp_state: state,
            ..attr
        },
    })
}

fn init(manager: &Manager, comm: CommId) -> Result<(u32, QpAttr), Errno> {
    let init = manager.qp_init(comm).map_err(refused)?;
    let reads = match init.remote_read_and_atomic {
        true => ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC,
        false => 0,
    };
    let attr = QpAttr {
        port_num: 1,
        qp_access_flags: (ACCESS_REMOTE_WRITE | reads).into(),
        ..QpAttr::default()
    };
    Ok((QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS, attr))
}

fn ready_to_receive(
    port: &PortConnections,
    manager: &Manager,
    comm: CommId,
) -> Result<(u32, QpAttr), Errno> {
    let ready = manager.qp_ready_to_receive(comm).map_err(refused)?;
    let index = port.of.gids.index(&ready.ports.local.0);
    // The GID of the operator names a port, too, whose guest has set others: it has no entry then.
    let index = index.and_then(|index| u8::try_from(index).ok());
    let route = ready.route;
    let mut mask = QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
    let mut attr = QpAttr {
        is_global: 1,
        sgid_index: index.ok_or(Errno::EADDRNOTAVAIL)?,
        dgid: ready.ports.remote.0,
        hop_limit: route.hop_limit,
        traffic_class: route.traffic_class,
        flow_label: route.flow_label.get().into(),
        sl: route.service_level.get(),
        static_rate: route.packet_rate.get(),
        ah_port: 1,
        path_mtu: route.path_mtu.number(),
        dest_qp_num: ready.dest_qpn.get().into(),
        rq_psn: ready.rq_psn.get().into(),
        ..QpAttr::default()
    };
    if let Some(reads) = ready.max_dest_rd_atomic {
        mask |= QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
        attr.max_dest_rd_atomic = reads;
    }
    Ok((mask, attr))
}

fn ready_to_send(manager: &Manager, comm: CommId) -> Result<(u32, QpAttr), Errno> {
    let ready = manager.qp_ready_to_send(comm).map_err(refused)?;
    let mut mask = QP_SQ_PSN;
    let mut attr = QpAttr {
        sq_psn: ready.sq_psn.get().into(),
        ..QpAttr::default()
    };
    if let Some(reliable) = ready.reliable {
        mask |= QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
        attr.timeout = reliable.timeout.get();
        attr.retry_cnt = reliable.retry_count.get();
        attr.rnr_retry = reliable.rnr_retry_count.get();
        attr.max_rd_atomic = reliable.max_rd_atomic;
    }
    Ok((mask, attr))
}

/// First port that a program is given, and how many there are, as with Linux.
const EPHEMERAL: (u16, u16) = (32_768, 28_232);

/// How many ports there are that a program may be given.
pub const EPHEMERAL_PORTS: u64 = EPHEMERAL.1 as u64;

/// Whether this is one of a port that a program may be given.
pub fn is_ephemeral(service: u64) -> bool {
    let (first, count) = EPHEMERAL;
    let service = IpService::of(ServiceId(service));
    service.is_some_and(|service| (first..first + count).contains(&service.port))
}

/// A port that a program may be given, of a number that was drawn.
pub fn ephemeral(drawn: u64) -> u16 {
    let first = EPHEMERAL.0;
    // What is left of a division by 16 bits has 16 bits.
    first + u16::try_from(drawn % EPHEMERAL_PORTS).unwrap_or_default()
}

/// The service of another port of the same protocol.
pub fn with_port(service: u64, port: u16) -> u64 {
    service & !0xffff | u64::from(port)
}

/// Whether this is one of a port of an IP protocol that is to be chosen.
pub fn wants_port(service: u64) -> bool {
    is_ip(service) && IpService::of(ServiceId(service)).is_some_and(|service| service.port == 0)
}
