//! Layout of management datagrams (MADs) and of the messages of communication management in them
//! (IBTA vol. 1, 13.4.3 and chapter 12, tables 106 to 120). Numbers are in network byte order;
//! fields of less than a byte are named by what shares theirs, the highest bits first.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a management datagram.
pub const MAD_BYTES: usize = 256;

/// Version of management datagrams.
pub const BASE_VERSION: u8 = 1;
/// Management class of communication management.
pub const CLASS: u8 = 0x07;
/// Version of that class.
pub const CLASS_VERSION: u8 = 2;
/// The only method of that class.
pub const METHOD_SEND: u8 = 0x03;

/// Attributes: which message it is.
pub mod attribute {
    /// Request for a connection.
    pub const REQ: u16 = 0x10;
    /// A message was received; its answer takes long.
    pub const MRA: u16 = 0x11;
    /// Rejection.
    pub const REJ: u16 = 0x12;
    /// Reply to a request.
    pub const REP: u16 = 0x13;
    /// Ready to use.
    pub const RTU: u16 = 0x14;
    /// Request for a disconnection.
    pub const DREQ: u16 = 0x15;
    /// Reply to that.
    pub const DREP: u16 = 0x16;
    /// Request for a service's queue pair of datagrams.
    pub const SIDR_REQ: u16 = 0x17;
    /// Reply to that.
    pub const SIDR_REP: u16 = 0x18;
}

macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
            pub(crate) struct $name { $($(#[$fdoc])* pub(crate) $field: $ty,)* }
        )*
    };
}

/// 24 bits.
pub(crate) type Bytes24 = [u8; 3];

layout! {
    /// Header of a management datagram.
    MadHeader {
        base_version: u8,
        class: u8,
        class_version: u8,
        method: u8,
        status: U16,
        class_specific: U16,
        transaction: U64,
        attribute: U16,
        reserved: U16,
        modifier: U32,
    }

    /// A path, as a request names it.
    PathBits {
        local_lid: U16,
        remote_lid: U16,
        local_gid: [u8; 16],
        remote_gid: [u8; 16],
        /// Flow label: 20, reserved: 6, packet rate: 6.
        flow_label_rate: U32,
        traffic_class: u8,
        hop_limit: u8,
        /// Service level: 4, subnet local: 1.
        sl_subnet_local: u8,
        /// Local ACK timeout: 5.
        ack_timeout: u8,
    }

    /// Table 106.
    ReqBits {
        header: MadHeader,
        local_comm_id: U32,
        reserved4: U32,
        service_id: U64,
        local_ca_guid: U64,
        reserved24: U32,
        local_q_key: U32,
        local_qpn: Bytes24,
        responder_resources: u8,
        local_eecn: Bytes24,
        initiator_depth: u8,
        remote_eecn: Bytes24,
        /// Remote CM response timeout: 5, transport service type: 2, end-to-end flow control: 1.
        remote_timeout_transport: u8,
        starting_psn: Bytes24,
        /// Local CM response timeout: 5, retry count: 3.
        local_timeout_retries: u8,
        partition_key: U16,
        /// Path MTU: 4, RDC exists: 1, RNR retry count: 3.
        mtu_rnr_retries: u8,
        /// Max CM retries: 4, SRQ: 1, extended transport type: 3.
        cm_retries_srq: u8,
        primary: PathBits,
        alternate: PathBits,
        private_data: [u8; 92],
    }

    /// Table 107.
    MraBits {
        header: MadHeader,
        local_comm_id: U32,
        remote_comm_id: U32,
        /// Message: 2.
        message: u8,
        /// Service timeout: 5.
        service_timeout: u8,
        private_data: [u8; 222],
    }

    /// Table 108.
    RejBits {
        header: MadHeader,
        local_comm_id: U32,
        remote_comm_id: U32,
        /// Message: 2.
        message: u8,
        /// Length of the information: 7.
        info_length: u8,
        reason: U16,
        info: [u8; 72],
        private_data: [u8; 148],
    }

    /// Table 110.
    RepBits {
        header: MadHeader,
        local_comm_id: U32,
        remote_comm_id: U32,
        local_q_key: U32,
        local_qpn: Bytes24,
        reserved15: u8,
        local_eecn: Bytes24,
        reserved19: u8,
        starting_psn: Bytes24,
        reserved23: u8,
        responder_resources: u8,
        initiator_depth: u8,
        /// Target ACK delay: 5, failover accepted: 2, end-to-end flow control: 1.
        ack_delay_failover: u8,
        /// RNR retry count: 3, SRQ: 1.
        rnr_retries_srq: u8,
        local_ca_guid: U64,
        private_data: [u8; 196],
    }

    /// Tables 111 and 113.
    RtuBits {
        header: MadHeader,
        local_comm_id: U32,
        remote_comm_id: U32,
        private_data: [u8; 224],
    }

    /// Table 112.
    DreqBits {
        header: MadHeader,
        local_comm_id: U32,
        remote_comm_id: U32,
        remote_qpn: Bytes24,
        reserved11: u8,
        private_data: [u8; 220],
    }

    /// Table 119.
    SidrReqBits {
        header: MadHeader,
        request_id: U32,
        partition_key: U16,
        reserved6: U16,
        service_id: U64,
        private_data: [u8; 216],
    }

    /// Table 120.
    SidrRepBits {
        header: MadHeader,
        request_id: U32,
        status: u8,
        info_length: u8,
        reserved6: U16,
        qpn: Bytes24,
        reserved11: u8,
        service_id: U64,
        q_key: U32,
        info: [u8; 72],
        private_data: [u8; 136],
    }

    /// Header of private data of the RDMA IP CM service (IBTA annex A11).
    IpHeaderBits {
        /// Major version: 4, minor version: 4.
        version: u8,
        /// IP version: 4.
        ip_version: u8,
        source_port: U16,
        /// An IPv4 address is in the last four bytes.
        source: [u8; 16],
        destination: [u8; 16],
    }
}

const _: () = {
    assert!(size_of::<MadHeader>() == 24);
    assert!(size_of::<PathBits>() == 44);
    assert!(size_of::<ReqBits>() == MAD_BYTES);
    assert!(size_of::<MraBits>() == MAD_BYTES);
    assert!(size_of::<RejBits>() == MAD_BYTES);
    assert!(size_of::<RepBits>() == MAD_BYTES);
    assert!(size_of::<RtuBits>() == MAD_BYTES);
    assert!(size_of::<DreqBits>() == MAD_BYTES);
    assert!(size_of::<SidrReqBits>() == MAD_BYTES);
    assert!(size_of::<SidrRepBits>() == MAD_BYTES);
    assert!(size_of::<IpHeaderBits>() == 36);
};
